"""A trainer's weights in the test's own process, announced in a proxy's ledger."""

import contextlib
import dataclasses
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from trainer.features.transfers import HeldVersions
from trainer.features.transfers.server import Transfer, WeightServer
from turnwise.engine_plugin.channel import Rendezvous
from turnwise.features import transfers
from turnwise.store.database import Database


def note_transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of workers of each transfer that a trainer of this process starts."""
    numbers, start = list[int](), Transfer.__init__

    def noted(self: Transfer, payload: torch.Tensor, rendezvous: Rendezvous, num_workers: int) -> None:
        numbers.append(num_workers)
        start(self, payload, rendezvous, num_workers)

    monkeypatch.setattr(Transfer, "__init__", noted)
    return numbers


@dataclasses.dataclass
class WeightsInMemory:
    server: WeightServer

    def hold(self, version: int, directory: Path) -> None:
        assert self.server.held.hold(version, load_file(directory / "model.safetensors"), {"token_ids": [1]})


@contextlib.contextmanager
def weights_in_memory(database_url: str) -> Iterator[WeightsInMemory]:
    server = WeightServer(HeldVersions())
    database = Database(database_url)
    try:
        for url in (server.url, None):
            with database.write() as connection:
                transfers.announce_weights(connection, "trainer", url, datetime.now(UTC))
            if url is not None:
                yield WeightsInMemory(server)
    finally:
        server.close()
        database.close()
