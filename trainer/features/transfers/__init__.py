"""Weights from memory: a new version is held for engines, at an announced address, before its directory is written.

A version is copied when it is made, with a checksum, so that training can go on while it is sent. A version with a
weight that is not finite is not held: engines then read its directory, where the same check names the tensor.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from trainer.claims.holds import Beside, OfFirst
from trainer.claims.ledger import Ledger
from trainer.features.transfers.server import WeightServer
from trainer.model.agent import PolicyAgent
from turnwise.engine_plugin.channel import TensorLayout, checksum_of
from turnwise.errors import StoreUnavailable
from turnwise.features import transfers
from turnwise.settings import Settings
from turnwise.store import database, rows, updates
from turnwise.types import Json, PolicyKind

log = logging.getLogger(__name__)

MOST_HELD = 2
"""Versions that stay in memory; engines get older ones from their directories."""


class TransferSettings(Settings):
    """Who gets weights from memory, and where they ask for them."""

    weight_transfer: bool = True
    """Send whole weights from memory to engines that were started for it (`turnwise engine`); other engines, and
    adapters, read the version's directory. False: all do."""
    weight_host: str = "127.0.0.1"
    """Address of this machine at which the proxy and the engines ask for weights; on several machines one that all of
    them reach, on a private network."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version in memory."""

    layout: TensorLayout
    buffer: Tensor
    """All weights. [layout.num_bytes], uint8"""
    checksum: str
    probe: Json | None
    """A text and its logprobs under these weights, as in a manifest; None without one."""


class HeldVersions:
    """The newest versions, for the thread that trains and the threads that send."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[int, HeldVersion] = {}

    def hold(self, version: int, weights: Mapping[str, Tensor], probe: Json | None) -> bool:
        """Copy a version; return False where a weight is not finite."""
        if not all(bool(torch.isfinite(value.sum(dtype=torch.float32))) for value in weights.values()):
            return False
        layout = TensorLayout.of(weights)
        buffer = layout.pack(weights)
        held = HeldVersion(layout, buffer, checksum_of(buffer), probe)
        with self._lock:
            self._held[version] = held
            for old in sorted(self._held)[:-MOST_HELD]:
                del self._held[old]
        return True

    def find(self, version: int) -> HeldVersion | None:
        with self._lock:
            return self._held.get(version)


class Transfers(Beside[TransferSettings]):
    """Holds a policy's newest versions on a server of its own, if they are whole weights."""

    def __init__(self, ledger: Ledger, learner: PolicyAgent, first: OfFirst) -> None:
        super().__init__(ledger, learner, first)
        self._sends = self._settings.weight_transfer and ledger.settings.kind is PolicyKind.FULL
        self.server: WeightServer | None = None
        """None where engines read directories, and in all processes but the first."""

    def opened(self, version: int, probe: Json | None) -> None:
        """Announce the server; fail the versions that an earlier process held and did not write."""
        ledger = self._ledger
        if self._learner.world.is_first:
            with ledger.db.write() as conn:
                last = updates.last_update(conn, policy_id=ledger.policy_id)
                lost = transfers.fail_unwritten(conn, last.policy_version if last else 0, ledger.policy_id)
            for each in lost:
                log.warning(
                    "version %d was not written before the trainer ended: it fails, and is not used again", each
                )
            if self._sends:
                self.serve()
            elif self.server is None:
                self._announce(None)
        if version and self._sends:
            self.takes(version, self._learner.policy.trained_state(), probe)

    def serve(self) -> WeightServer:
        """Return the server, which is started and announced at the first call."""
        if self.server is None:
            self.server = WeightServer(HeldVersions(), self._settings.weight_host)
            self._announce(self.server)
        return self.server

    def takes(self, version: int, weights: dict[str, Tensor], probe: Json | None) -> bool:
        if self.server is None or not self._sends:
            return False
        is_held = self.server.held.hold(version, self._learner.policy.published(weights), probe)
        if not is_held:
            log.error("version %d has weights that are not finite; engines will refuse its directory", version)
        return is_held

    def close(self) -> None:
        if self.server is not None:
            self._announce(None)
            self.server.close()

    def _announce(self, server: WeightServer | None) -> None:
        """Store where the weights are handed out; engines read directories while the address is not known."""
        ledger, url = self._ledger, None if server is None else server.url
        try:
            with ledger.db.write() as conn:
                now = rows.from_micros(database.clock(conn))
                transfers.announce_weights(conn, ledger.settings.trainer_id, url, now)
        except StoreUnavailable as error:
            log.warning("the address of the weights was not stored, engines read directories: %s", error)
