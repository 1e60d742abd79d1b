"""A small model for the tests of a module, and a ledger for each test."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.migrated import new_database
from support.tiny_models import make_model

from trainer.claims import ledger as trainer_ledger
from trainer.claims.ledger import Renewal
from turnwise.store.database import Database


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory; torch gets one thread, so that its results are the same on every machine."""
    torch.set_num_threads(1)
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Give torch one thread for a test, so that its sums are the same on every machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Database]:
    database = new_database(tmp_path / "ledger.db")
    yield database
    database.close()


@pytest.fixture(autouse=True)
def no_lease_outlives_its_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Stop the threads that renew claims, also of trainers that a test let die; they would look for its database."""
    held: list[Renewal] = []

    class NotedRenewal(Renewal):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            held.append(self)

    monkeypatch.setattr(trainer_ledger, "Renewal", NotedRenewal)
    yield
    for lease in held:
        lease.stop()
