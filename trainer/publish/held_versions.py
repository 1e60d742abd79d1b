"""The versions that the trainer holds in memory for engines: their bytes and their checksums.

A version is copied when it is made, so that training can go on while it is sent. A version with a weight that is not
finite is not held: engines then read its directory, where the same check names the tensor.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping

import torch
from torch import Tensor

from turnwise.engine_plugin.layout import Layout, checksum_of
from turnwise.types import Json

MOST_HELD = 2
"""Versions that stay in memory; engines get older ones from their directories."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeldVersion:
    """A version in memory."""

    version: int
    layout: Layout
    buffer: Tensor
    """All weights. [layout.num_bytes], uint8"""
    checksum: str
    probe: Json | None
    """A text and its logprobs under these weights, as in a manifest; None without one."""


class HeldVersions:
    """The newest versions, for the thread that trains and the threads that send."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._versions: dict[int, HeldVersion] = {}

    def hold(self, version: int, weights: Mapping[str, Tensor], probe: Json | None) -> bool:
        """Copy a version; return False where a weight is not finite."""
        if not all(bool(torch.isfinite(value.sum(dtype=torch.float32))) for value in weights.values()):
            return False
        layout = Layout.of(weights)
        buffer = layout.pack(weights)
        held = HeldVersion(version, layout, buffer, checksum_of(buffer), probe)
        with self._lock:
            self._versions[version] = held
            for old in sorted(self._versions)[:-MOST_HELD]:
                del self._versions[old]
        return True

    def find(self, version: int) -> HeldVersion | None:
        """Return a version; None if it is not in memory."""
        with self._lock:
            return self._versions.get(version)
