"""vLLM's own weight transfer classes on a CPU: its parsers and its unpacking, with its devices replaced.

The objects are given to fake engines, so that what the proxy and the trainer send is judged by vLLM's code. NCCL is
replaced on both sides by queues between threads, and handles of GPU memory by names of tensors of this process.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

GPU = "GPU-0"


class Model(torch.nn.Module):
    """Keeps what is loaded, as copies, since a sender may reuse its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: dict[str, Tensor] = {}

    def load_weights(self, weights: Any) -> None:
        self.loaded |= {name: tensor.clone() for name, tensor in weights}


class Wire:
    """A group of NCCL: rank 0 sends, one worker receives."""

    def __init__(self) -> None:
        self.joined = threading.Barrier(2)
        self.sent: queue.Queue[Tensor] = queue.Queue()


class FakeNccl:
    """`trainer.publish.nccl` and the communicator of a worker of vLLM."""

    NcclFailed = RuntimeError

    def __init__(self) -> None:
        self.wires: dict[bytes, Wire] = {}
        self.aborted = 0

    def new_unique_id(self) -> bytes:
        made = bytes([len(self.wires)]) * 128
        self.wires[made] = Wire()
        return made

    def Group(self, unique_id: bytes, size: int, device: torch.device) -> Any:  # noqa: N802  a class there
        assert size == 2
        wire = self.wires[unique_id]
        wire.joined.wait(60)
        return SimpleNamespace(broadcast=wire.sent.put, is_done=wire.sent.empty, abort=self._abort)

    def worker(self, unique_id: bytes, rank: int, world_size: int, device: object) -> Any:
        assert (rank, world_size) == (1, 2)
        wire = self.wires[unique_id]
        wire.joined.wait(60)

        def broadcast(tensor: Tensor, src: int, stream: object = None) -> None:
            payload = wire.sent.get(timeout=60)
            assert (src, payload.shape, payload.dtype) == (0, tensor.shape, tensor.dtype)
            tensor.copy_(payload)

        return SimpleNamespace(broadcast=broadcast, destroy=lambda: None)

    def _abort(self) -> None:
        self.aborted += 1


def replace_devices(patch: pytest.MonkeyPatch) -> FakeNccl:
    """Let trainer and vLLM find one GPU, which is this process's memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that vLLM imports
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.weight_transfer import ipc_engine, nccl_engine, packed_tensor
        from vllm.model_executor.model_loader import mtp_validation, reload

    from trainer.publish import staged_transfer

    fake, shared = FakeNccl(), dict[int, Tensor]()
    stream = SimpleNamespace(synchronize=lambda: None)

    def share(tensor: Tensor) -> tuple[object, tuple[object, ...]]:
        shared[id(tensor)] = tensor
        return None, (id(tensor), None, None, None, None, None, 0)

    patch.setattr(staged_transfer, "nccl", fake)
    patch.setattr(staged_transfer, "reduce_tensor", share)
    patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=GPU))
    patch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    patch.setattr(torch.accelerator, "synchronize", lambda: None)
    patch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    patch.setattr(packed_tensor, "_get_streams", lambda _device, count: (stream,) * count)
    patch.setattr(PyNcclCommunicator, "from_unique_id_bytes", staticmethod(fake.worker))
    patch.setattr("torch.multiprocessing.reductions.rebuild_cuda_tensor", lambda place, *_: shared[place])
    for name in ("initialize_layerwise_reload", "finalize_layerwise_reload"):
        patch.setattr(reload, name, lambda *_: None)
    for module in (ipc_engine, nccl_engine, mtp_validation):
        assert module.__name__.startswith("vllm.")
    patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    return fake


def vllm_engine(backend: str) -> Any:
    """Return a worker's object of this backend, over a model that keeps what it gets."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config = SimpleNamespace(parallel_config=parallel, model_config=None)
    return WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), config, torch.device("cpu"), Model()
    )
