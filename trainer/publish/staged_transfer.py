"""Versions for engines that use vLLM's own weight transfer: the backends `nccl` and `ipc`.

A version is copied to the trainer's GPU before an engine pauses, cut into chunks as vLLM cuts them. With `nccl` all
workers of an engine receive the chunks from a group that stays open between versions. With `ipc` the one worker of an
engine on the same GPU reads them where they are. The bodies are those of the HTTP routes of vLLM 0.32.
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import pickle
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from trainer.publish import nccl
from trainer.publish.held_versions import HeldVersion
from turnwise.engine_plugin.layout import Slot
from turnwise.types import Json

log = logging.getLogger(__name__)

StagedBackend = Literal["nccl", "ipc"]
CHUNK_BYTES = 256 * 2**20
"""A chunk ends with the tensor that makes it larger than this, as in vLLM's packed transfers."""
POLL_SECONDS = 0.001


class StagingFailed(Exception):
    """A version that cannot be sent by a backend of vLLM; the message says why."""


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tensors of a version on the device."""

    slots: tuple[Slot, ...]
    payload: Tensor
    """Their bytes, without gaps. [sum of their sizes], uint8"""

    def described(self) -> Json:
        """Return what vLLM has to know of each tensor."""
        return describe(self.slots)


def describe(slots: Sequence[Slot]) -> Json:
    """Return names, types and shapes as in vLLM's update info."""
    return {
        "names": [slot.name for slot in slots],
        "dtype_names": [slot.dtype for slot in slots],
        "shapes": [list(slot.shape) for slot in slots],
    }


def cut(slots: Sequence[Slot], chunk_bytes: int) -> Iterator[tuple[Slot, ...]]:
    """Yield the tensors of each chunk; both sides of a packed transfer must cut alike."""
    inside: list[Slot] = []
    for slot in slots:
        inside.append(slot)
        if sum(each.num_bytes for each in inside) > chunk_bytes:
            yield tuple(inside)
            inside = []
    if inside:
        yield tuple(inside)


def stage(held: HeldVersion, device: torch.device) -> list[Chunk]:
    """Copy a version to the device.

    Raises:
        StagingFailed: It does not fit into the device's memory.
    """
    chunks = []
    try:
        for slots in cut(held.layout.slots, CHUNK_BYTES):
            parts = [held.buffer[slot.offset : slot.offset + slot.num_bytes] for slot in slots]
            chunks.append(Chunk(slots, torch.cat(parts).to(device)))
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
    except torch.OutOfMemoryError as error:
        size = held.layout.num_bytes
        raise StagingFailed(f"{size} bytes for version {held.version} do not fit beside the training") from error
    return chunks


class Connection:
    """A group with the workers of one engine; it opens in the background, while the engine joins it."""

    def __init__(self, num_workers: int, device: torch.device) -> None:
        self.connection_id = secrets.token_hex(8)
        self._unique_id = nccl.new_unique_id()
        self._size = 1 + num_workers
        self._group: nccl.Group | None = None
        self._error = "the engine did not join the group"
        self._opened = threading.Event()
        self._device = device
        threading.Thread(target=self._open, name="nccl", daemon=True).start()

    @property
    def is_open(self) -> bool:
        """Whether it can send, as far as is known."""
        return self._group is not None

    def init_info(self) -> Json:
        """Return the body for `/init_weight_transfer_engine`."""
        return {
            "nccl_unique_id_b64": base64.b64encode(self._unique_id).decode(),
            "rank_offset": 1,
            "world_size": self._size,
            "packed": True,
            "packed_buffer_size_bytes": CHUNK_BYTES,
            "packed_num_buffers": 2,
        }

    def send(self, chunks: Sequence[Chunk], seconds: float, cancelled: threading.Event) -> None:
        """Send chunks to all workers.

        Raises:
            StagingFailed: A worker is missing, or the transfer was cancelled. The group is closed.
        """
        deadline = time.monotonic() + seconds
        if not self._opened.wait(seconds) or self._group is None:
            raise StagingFailed(self._error)
        try:
            for chunk in chunks:
                self._group.broadcast(chunk.payload)
        except nccl.NcclFailed as error:
            self.close()
            raise StagingFailed(str(error)) from error
        while not self._group.is_done():
            if cancelled.is_set() or time.monotonic() > deadline:
                self.close()
                raise StagingFailed("the engine stopped receiving")
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Leave the group, and stop what is running in it."""
        if self._group is not None:
            group, self._group, self._error = self._group, None, "the group was closed"
            group.abort()

    def _open(self) -> None:
        try:
            self._group = nccl.Group(self._unique_id, self._size, self._device)
        except (nccl.NcclFailed, RuntimeError) as error:
            self._error = str(error)
        self._opened.set()


class StagedTransfer:
    """One version on the device, until one engine has loaded it or the time limit has passed."""

    def __init__(self, chunks: list[Chunk], connection: Connection | None, seconds: float) -> None:
        self._chunks = chunks
        self._connection = connection
        self._seconds = seconds
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: str | None = None
        self._limit = threading.Timer(0, self.end)
        self._extend()

    def begin(self) -> None:
        """Start to send, where the backend sends: the engine receives at the same time."""
        self._extend()
        if self._connection is not None:
            self._thread = threading.Thread(target=self._send, args=(self._connection,), name="weights", daemon=True)
            self._thread.start()

    def end(self, *, is_loaded: bool = False) -> None:
        """Release the memory; a transfer that is still running is cancelled unless the engine has all of it."""
        self._limit.cancel()
        if not is_loaded:
            self._cancelled.set()
        if self._thread is not None:
            self._thread.join()
        if not is_loaded and self._connection is not None:
            self._connection.close()
        self._chunks = []
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]

    def _send(self, connection: Connection) -> None:
        try:
            connection.send(self._chunks, self._seconds, self._cancelled)
        except StagingFailed as error:
            self.error = str(error)
            log.warning("a transfer of weights failed: %s", error)

    def _extend(self) -> None:
        self._limit.cancel()
        self._limit = threading.Timer(self._seconds, self.end)
        self._limit.daemon = True
        self._limit.start()


def own_gpu() -> torch.device | None:
    """Return the GPU of this process; None without one."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else None


class StagedTransfers:
    """All transfers by vLLM's own backends."""

    def __init__(self, seconds: float, device: torch.device | None) -> None:
        self._seconds = seconds
        self._device = device
        self._connections: dict[str, Connection] = {}
        """The open group of each engine, by the engine's URL."""
        self._transfers: dict[str, StagedTransfer] = {}
        self._lock = threading.Lock()

    def prepare(self, held: HeldVersion, backend: StagedBackend, request: Json) -> Json:
        """Copy a version to the device; return what the proxy sends to the engine.

        Args:
            held: The version.
            backend: The backend that the engine was started with.
            request: `engine`, its URL; `num_workers`; `connection`, the id of the group that the engine has joined.

        Raises:
            StagingFailed: It cannot be sent in this way.
        """
        if self._device is None:
            raise StagingFailed(f"the trainer has no GPU, which vLLM's backend {backend!r} needs")
        if backend == "ipc" and request["num_workers"] != 1:
            raise StagingFailed(f"backend 'ipc' serves engines of one GPU, not of {request['num_workers']}")
        chunks = stage(held, self._device)
        connection, init_info = None, None
        if backend == "nccl":
            connection, is_new = self._connect(
                str(request["engine"]), request.get("connection"), request["num_workers"]
            )
            init_info = connection.init_info() if is_new else None
            updates = [describe(held.layout.slots)]
        else:
            init_info = {"packed": True}
            updates = [_ipc_update(chunk, self._device) for chunk in chunks]
        transfer_id = secrets.token_hex(8)
        with self._lock:
            self._transfers[transfer_id] = StagedTransfer(chunks, connection, self._seconds)
        return {
            "transfer_id": transfer_id,
            "connection": None if connection is None else connection.connection_id,
            "init_info": init_info,
            "updates": updates,
        }

    def begin(self, transfer_id: str) -> bool:
        """Start to send; return False where the transfer is not known."""
        transfer = self._transfers.get(transfer_id)
        if transfer is None:
            return False
        transfer.begin()
        return True

    def end(self, transfer_id: str, *, is_loaded: bool) -> str | None:
        """Release a transfer's memory; return why it failed here, None if it did not."""
        with self._lock:
            transfer = self._transfers.pop(transfer_id, None)
        if transfer is None:
            return "the transfer is not known"
        transfer.end(is_loaded=is_loaded)
        return transfer.error

    def _connect(self, engine: str, connection_id: object, num_workers: int) -> tuple[Connection, bool]:
        """Return the group with an engine, and whether it is new."""
        assert self._device is not None
        with self._lock:
            known = self._connections.get(engine)
            if known is not None and known.is_open and known.connection_id == connection_id:
                return known, False
            if known is not None:
                known.close()
            try:
                made = self._connections[engine] = Connection(num_workers, self._device)
            except nccl.NcclFailed as error:
                raise StagingFailed(str(error)) from error
            return made, True


def _ipc_update(chunk: Chunk, device: torch.device) -> Json:
    """Return the update info of a chunk: where the process on the same GPU finds it."""
    _, arguments = reduce_tensor(chunk.payload)  # type: ignore[no-untyped-call]
    handles = {str(torch.cuda.get_device_properties(device).uuid): arguments}
    return chunk.described() | {
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        "tensor_sizes": [slot.num_bytes for slot in chunk.slots],
    }
