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
    size = 0
    for slot in slots:
        inside.append(slot)
        size += slot.num_bytes
        if size > chunk_bytes:
            yield tuple(inside)
            inside, size = [], 0
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
        self._lock = threading.Lock()
        """Held while the group is set or taken: aborting one twice would end the trainer."""
        self._group: nccl.Group | None = None
        self._is_closed = False
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
        self._opened.wait(seconds)
        try:
            self._send_all(chunks, deadline, cancelled)
        except (StagingFailed, nccl.NcclFailed, RuntimeError) as error:  # torch raises RuntimeError for errors of CUDA
            self.close()
            raise StagingFailed(str(error)) from error

    def close(self) -> None:
        """Leave the group, and stop what is running in it; a group that is still opening is left once it is open."""
        with self._lock:
            self._is_closed = True
            group, self._group = self._group, None
            if group is not None:
                self._error = "the group was closed"
        if group is not None:
            group.abort()

    def _send_all(self, chunks: Sequence[Chunk], deadline: float, cancelled: threading.Event) -> None:
        group = self._group
        if group is None:
            raise StagingFailed(self._error)
        for chunk in chunks:
            group.broadcast(chunk.payload)
        while not group.is_done():
            if cancelled.is_set() or time.monotonic() > deadline:
                raise StagingFailed("the engine stopped receiving")
            time.sleep(POLL_SECONDS)

    def _open(self) -> None:
        try:
            group = nccl.Group(self._unique_id, self._size, self._device)
            while not (group.is_done() or self._is_closed):
                time.sleep(POLL_SECONDS)
        except (nccl.NcclFailed, RuntimeError) as error:
            self._error = str(error)
        else:
            with self._lock:
                if not self._is_closed:
                    self._group = group
            if self._group is not group:
                group.abort()
        self._opened.set()


class StagedTransfer:
    """One version on the device, until one engine has loaded it or the time limit has passed."""

    def __init__(self, chunks: list[Chunk], connection: Connection | None, seconds: float) -> None:
        self.transfer_id = secrets.token_hex(8)
        self._chunks = chunks
        self._connection = connection
        self._seconds = seconds
        self._cancelled = threading.Event()
        self._thread: threading.Thread | None = None
        self.error: str | None = None
        self._lock = threading.Lock()
        """Held while the transfer begins or ends."""
        self._is_ended = False
        self._limit = self._new_limit()

    def begin(self) -> bool:
        """Start to send, where the backend sends: the engine receives at the same time; False after the end."""
        with self._lock:
            if self._is_ended:
                return False
            self._limit.cancel()
            self._limit = self._new_limit()
            if self._connection is not None:
                self._thread = threading.Thread(
                    target=self._send, args=(self._connection,), name="weights", daemon=True
                )
                self._thread.start()
        return True

    def end(self, *, is_loaded: bool = False) -> None:
        """Release the memory; a transfer that is still running is cancelled unless the engine has all of it."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
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

    def _new_limit(self) -> threading.Timer:
        limit = threading.Timer(self._seconds, self._expire)
        limit.daemon = True
        limit.start()
        return limit

    def _expire(self) -> None:
        with self._lock:
            is_due = threading.current_thread() is self._limit  # not if the transfer began at this very moment
        if is_due:
            self.end()


class StagedTransfers:
    """All transfers by vLLM's own backends."""

    def __init__(self, seconds: float, device: torch.device | None) -> None:
        self._seconds = seconds
        self._device = device
        self._connections: dict[str, Connection] = {}
        """The open group of each engine, by the engine's URL."""
        self._transfers: dict[str, StagedTransfer] = {}
        """The latest transfer to each engine, by the engine's URL."""
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
        engine = str(request["engine"])
        earlier = self._transfers.get(engine)
        if earlier is not None:
            earlier.end()  # its memory is free at once; a proxy that asks again does not use it any more
        chunks = stage(held, self._device)
        connection, init_info = None, None
        if backend == "nccl":
            connection, is_new = self._connect(engine, request.get("connection"), request["num_workers"])
            init_info = connection.init_info() if is_new else None
            updates = [describe(held.layout.slots)]
        else:
            init_info = {"packed": True}
            updates = [_ipc_update(chunk, self._device) for chunk in chunks]
        transfer = self._transfers[engine] = StagedTransfer(chunks, connection, self._seconds)
        return {
            "transfer_id": transfer.transfer_id,
            "connection": None if connection is None else connection.connection_id,
            "init_info": init_info,
            "updates": updates,
        }

    def begin(self, transfer_id: str) -> bool:
        """Start to send; return False where the transfer is not known, or has ended."""
        transfer = self._find(transfer_id)
        return transfer is not None and transfer.begin()

    def end(self, transfer_id: str, *, is_loaded: bool) -> str | None:
        """Release a transfer's memory; return why it failed here, None if it did not."""
        transfer = self._find(transfer_id)
        if transfer is None:
            return "the transfer is not known"
        transfer.end(is_loaded=is_loaded)
        return transfer.error

    def _find(self, transfer_id: str) -> StagedTransfer | None:
        return next((one for one in list(self._transfers.values()) if one.transfer_id == transfer_id), None)

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
    """Return the update info of a chunk: where the process on the same GPU finds it.

    Raises:
        StagingFailed: CUDA does not share memory between processes here.
    """
    try:
        _, arguments = reduce_tensor(chunk.payload)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise StagingFailed(f"the GPU's memory cannot be shared with the engine: {error}; use 'turnwise'") from error
    handles = {str(torch.cuda.get_device_properties(device).uuid): arguments}
    return chunk.described() | {
        "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        "tensor_sizes": [slot.num_bytes for slot in chunk.slots],
    }
