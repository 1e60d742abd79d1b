"""The memory into which an engine receives a version: pinned where there is a GPU. The GPU is replaced here."""

from __future__ import annotations

import contextlib

import pytest
import torch

from turnwise.engine_plugin import receiver as receiver_module
from turnwise.engine_plugin.layout import Layout, checksum_of
from turnwise.engine_plugin.receiver import Receiver, TransferInfo


class Sent:
    """A channel by which zeros arrive."""

    def broadcast(self, _buffer: torch.Tensor, _chunk_bytes: int) -> None:
        """Leave the buffer as it is."""

    def agree(self, is_good: bool) -> bool:
        return is_good


class Runtime:
    """CUDA's runtime, as far as it pins memory."""

    def __init__(self, status: int) -> None:
        self.status = status
        self.calls: list[tuple[str, int]] = []
        self.addresses: list[int] = []

    def cudaHostRegister(self, address: int, size: int, _flags: int) -> int:  # noqa: N802  CUDA's name
        self.calls.append(("pin", size))
        self.addresses.append(address)
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802  CUDA's name
        self.calls.append(("unpin", self.addresses.index(address)))
        return 0


def take(receiver: Receiver, version: int, num_values: int) -> None:
    """Receive one tensor of zeros, and check it."""
    zeros = {"weight": torch.zeros(num_values)}
    layout = Layout.of(zeros)
    receiver.begin(TransferInfo(version, "host", 1, 2, layout.as_json(), checksum_of(layout.pack(zeros))), 1)
    assert torch.equal(dict(receiver.take(version, 10.0))["weight"], zeros["weight"])


@pytest.mark.parametrize("status", [0, 2])
def test_memory_for_weights_is_pinned_once_for_each_size_and_used_also_where_that_fails(monkeypatch, status):
    runtime, gpus = Runtime(status), []
    monkeypatch.setattr(receiver_module.Channel, "join", lambda *_, **__: Sent())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "device", lambda gpu: gpus.append(gpu) or contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    receiver = Receiver()
    take(receiver, 1, 1024)
    take(receiver, 2, 1024)
    take(receiver, 3, 2048)
    unpinned = [("unpin", 0)] if status == 0 else []
    assert runtime.calls == [("pin", 4096), *unpinned, ("pin", 8192)]
    assert gpus == [3, 3]


def test_without_a_gpu_memory_for_weights_is_not_pinned(monkeypatch):
    monkeypatch.setattr(receiver_module.Channel, "join", lambda *_, **__: Sent())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: pytest.fail("there is no GPU"))
    take(Receiver(), 1, 1024)
