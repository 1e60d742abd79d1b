"""Versions on the trainer's GPU: their ends, and groups of NCCL that fail. The GPU is this process's memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.publish import nccl, staged_transfer
from trainer.publish.held_versions import HeldVersion, HeldVersions
from trainer.publish.staged_transfer import StagedTransfers, StagingFailed

CPU = torch.device("cpu")
WEIGHT = torch.arange(6, dtype=torch.float32)


class Groups:
    """Stands in for NCCL: groups open at once or when they are let, and send at once or never."""

    def __init__(self) -> None:
        self.can_join = threading.Event()
        self.can_join.set()
        self.done: Callable[[], bool] = lambda: True
        self.sent: list[bytes] = []
        self.num_aborted = 0

    def open(self, *_: object) -> Any:
        assert self.can_join.wait(60)
        return SimpleNamespace(broadcast=self._send, is_done=self.done, abort=self._abort)

    def _send(self, payload: torch.Tensor) -> None:
        self.sent.append(bytes(payload.numpy()))

    def _abort(self) -> None:
        self.num_aborted += 1


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Groups:
    found = Groups()
    monkeypatch.setattr(nccl, "new_unique_id", lambda: bytes(128))
    monkeypatch.setattr(nccl, "Group", found.open)
    return found


@pytest.fixture
def held() -> HeldVersion:
    versions = HeldVersions(1)
    versions.hold(1, {"w": WEIGHT}, None)
    found = versions.find(1)
    assert found is not None
    return found


def request(**changes: object) -> dict[str, Any]:
    return {"engine": "http://engine", "num_workers": 1, "connection": None} | changes


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_transfer_after_its_time_limit_is_not_begun(groups: Groups, held: HeldVersion):
    """An engine that were told to receive would wait forever: the chunks are gone, and the group is closed."""
    transfers = StagedTransfers(0.05, CPU)
    made = transfers.prepare(held, "nccl", request())
    wait_until(lambda: groups.num_aborted == 1)
    assert not transfers.begin(made["transfer_id"])
    assert groups.sent == []


def test_a_version_is_sent_once_and_its_group_is_used_again(groups: Groups, held: HeldVersion):
    transfers = StagedTransfers(30, CPU)
    first = transfers.prepare(held, "nccl", request())
    assert transfers.begin(first["transfer_id"])
    assert transfers.end(first["transfer_id"], is_loaded=True) is None
    second = transfers.prepare(held, "nccl", request(connection=first["connection"]))
    assert (second["connection"], second["init_info"]) == (first["connection"], None)
    assert (groups.sent, groups.num_aborted) == ([WEIGHT.numpy().tobytes()], 0)
    transfers.end(second["transfer_id"], is_loaded=True)


def test_a_new_request_for_an_engine_ends_the_transfer_before_it(groups: Groups, held: HeldVersion):
    groups.done = lambda: not groups.sent  # what was sent is never received
    transfers = StagedTransfers(30, CPU)
    first = transfers.prepare(held, "nccl", request())
    assert transfers.begin(first["transfer_id"])
    wait_until(lambda: bool(groups.sent))
    second = transfers.prepare(held, "nccl", request())
    assert second["connection"] != first["connection"]
    assert groups.num_aborted == 1
    assert transfers.end(first["transfer_id"], is_loaded=False) == "the transfer is not known"
    assert not transfers.begin(first["transfer_id"])
    transfers.end(second["transfer_id"], is_loaded=False)


def test_a_group_that_opens_after_its_transfer_ended_is_aborted(groups: Groups, held: HeldVersion):
    groups.can_join.clear()
    transfers = StagedTransfers(30, CPU)
    made = transfers.prepare(held, "nccl", request())
    transfers.end(made["transfer_id"], is_loaded=False)
    groups.can_join.set()
    wait_until(lambda: groups.num_aborted == 1)


def test_an_error_of_cuda_while_sending_is_the_transfers_error(groups: Groups, held: HeldVersion):
    def failed() -> bool:
        if groups.sent:
            raise RuntimeError("CUDA error: an illegal memory access")
        return True

    groups.done = failed
    transfers = StagedTransfers(30, CPU)
    made = transfers.prepare(held, "nccl", request())
    transfers.begin(made["transfer_id"])
    assert transfers.end(made["transfer_id"], is_loaded=True) == "CUDA error: an illegal memory access"
    assert groups.num_aborted == 1


def test_a_trainer_without_a_gpu_and_an_engine_of_two_gpus_are_refused(held: HeldVersion):
    with pytest.raises(StagingFailed, match="the trainer has no GPU"):
        StagedTransfers(30, None).prepare(held, "nccl", request())
    with pytest.raises(StagingFailed, match="serves engines of one GPU, not of 2"):
        StagedTransfers(30, CPU).prepare(held, "ipc", request(num_workers=2))


def test_memory_that_cuda_does_not_share_is_named(held: HeldVersion, monkeypatch: pytest.MonkeyPatch):
    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError("CUDA error: operation not supported")

    monkeypatch.setattr(staged_transfer, "reduce_tensor", refuse)
    with pytest.raises(StagingFailed, match="cannot be shared with the engine: CUDA error: operation not supported"):
        StagedTransfers(30, CPU).prepare(held, "ipc", request())
