"""A process beside the proxy for work that would hold the event loop: decoding requests of many megabytes.

Decoding JSON holds the interpreter's lock, so a thread would stop the event loop as long as the loop itself. Decoding
16 MiB of text takes 13 to 19 ms; to read the decoded request from another process takes 2 ms. The process starts with
the first such request, does one job at a time, and ends with the proxy. Tenants with waiting jobs take turns, so that
one with many long requests delays another's by one job. A result comes in pieces: to read a pickle of many messages at
once would hold the interpreter's lock again.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import io
import logging
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeVar

from turnwise.errors import ProxyUnavailable, TurnwiseError

log = logging.getLogger(__name__)
T = TypeVar("T")
JOB_SECONDS = 60.0
"""How long a job may take; the first one includes the start of the process."""
PIECE_BYTES = 256 * 2**10
"""Items of a result are pickled together up to this length; a longer item is a separate piece."""
LONG_PIECE_BYTES = 2**20
"""A longer piece is sent twice: the pickle as it is stored, and its items with separate long strings."""
LONG_STRING = 64 * 2**10
"""Characters of a string that is sent separately."""
_LENGTHS = struct.Struct("<QQ")
"""Lengths of a job's pickle and of its data; of a result and of its data; of a piece and its number of items."""


class Result(NamedTuple):
    """What a job returns, if it is long."""

    head: Any
    items: list[Any]
    data: bytes = b""
    pieces: tuple[tuple[int, bytes], ...] = ()
    """The items as they were sent: the number of items of each pickle, and the pickle of their list."""


class FairLock:
    """A lock for which tenants take turns; those who wait for one tenant get it in their order."""

    def __init__(self) -> None:
        self._is_held = False
        self._waiting: dict[str, collections.deque[asyncio.Future[None]]] = {}
        """Who waits, by tenant; the first tenant is next."""

    async def acquire(self, tenant: str) -> None:
        """Wait for the lock and hold it."""
        if not self._is_held:
            self._is_held = True
            return
        granted = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, collections.deque()).append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if not granted.cancelled():
                self.release()  # it was granted at the same time
            raise

    def release(self) -> None:
        """Pass the lock on to the first of the next tenant."""
        while self._waiting:
            tenant, waiting = next(iter(self._waiting.items()))
            granted = waiting.popleft()
            if granted.cancelled() and waiting:
                continue  # the tenant keeps its turn
            del self._waiting[tenant]
            if waiting:
                self._waiting[tenant] = waiting
            if not granted.cancelled():
                granted.set_result(None)
                return
        self._is_held = False


class DecodingProcess:
    """The process, and the jobs for it."""

    def __init__(self) -> None:
        self._lock = FairLock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def do(self, tenant: str, function: Callable[..., T], data: bytes, **options: Any) -> T:
        """Call a function with the data in the other process; it must be importable by its name.

        A running job of a caller that is cancelled is done to its end, because its answer must not be read by the next.

        Raises:
            ProxyUnavailable: the process ended or did not answer.
            TurnwiseError: what the function raises.
        """
        await self._lock.acquire(tenant)
        return await asyncio.shield(self._do(function, data, options))

    async def _do(self, function: Callable[..., T], data: bytes, options: dict[str, Any]) -> T:
        """Call the function, then release the lock."""
        try:
            result = await asyncio.to_thread(self._call, pickle.dumps((function, options)), data)
        except (OSError, EOFError) as error:
            log.warning("the process that decodes long requests failed, another is started for the next: %s", error)
            await asyncio.to_thread(self.close)
            raise ProxyUnavailable(
                "the process that decodes long requests failed; nothing was sampled, retry"
            ) from error
        finally:
            self._lock.release()
        if isinstance(result, TurnwiseError):
            raise result
        return result  # type: ignore[no-any-return]  # what the function returned

    def close(self) -> None:
        """End the process."""
        link, process, self._link, self._process = self._link, self._process, None, None
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            process.wait()

    def _call(self, job: bytes, data: bytes) -> Any:
        link = self._link or self._start()
        link.sendall(_LENGTHS.pack(len(job), len(data)) + job)
        link.sendall(data)
        num_head, num_data = _LENGTHS.unpack(receive_exactly(link, _LENGTHS.size))
        head = pickle.loads(receive_exactly(link, num_head))  # noqa: S301  from our own process
        if not isinstance(head, Result):
            return head
        returned, items, pieces = receive_exactly(link, num_data), [], []
        while (lengths := _LENGTHS.unpack(receive_exactly(link, _LENGTHS.size))) != _END:
            piece = receive_exactly(link, lengths[0])
            pieces.append((lengths[1], piece))
            items += _receive_long(link) if len(piece) > LONG_PIECE_BYTES else pickle.loads(piece)  # noqa: S301  ours
        return Result(_receive_long(link), items, returned, tuple(pieces))

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            argv = [
                sys.executable,
                "-c",
                "from proxy.dialects.decoding_process import main; main()",
                str(theirs.fileno()),
            ]
            self._process = subprocess.Popen(argv, pass_fds=[theirs.fileno()])  # noqa: S603  a fork of our own
        # Blocking, so that the kernel collects a whole message; Python's own timeout would make it non-blocking.
        seconds = struct.pack("@ll", int(JOB_SECONDS), 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, seconds)
        self._link = ours
        return ours


_END = (0, 0)
"""Follows the last piece."""


def receive_exactly(link: socket.socket, length: int) -> bytes:
    """Return exactly so many bytes; the kernel fills them without the interpreter's lock.

    Raises:
        EOFError: the other end has closed the link, or was silent for `JOB_SECONDS`.
    """
    found = b""
    while len(found) < length:
        received = link.recv(length - len(found), socket.MSG_WAITALL)
        if not received:
            raise EOFError("the link is closed")
        found = received if not found else found + received
    return found


class _Pickler(pickle.Pickler):
    """Pickles a value without its long strings."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.strings: list[str] = []

    def persistent_id(self, value: Any) -> int | None:
        """Return the number of a long string."""
        if type(value) is not str or len(value) <= LONG_STRING:
            return None
        self.strings.append(value)
        return len(self.strings) - 1


class _Unpickler(pickle.Unpickler):
    """Reads such a pickle."""

    def __init__(self, pickled: bytes, strings: list[str]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._strings = strings

    def persistent_load(self, number: int) -> str:
        """Return a long string."""
        return self._strings[number]


def _send_long(link: socket.socket, value: Any) -> None:
    """Send the head of a result, or the items of a long piece, with separate long strings."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    pickled = file.getvalue()
    link.sendall(_LENGTHS.pack(len(pickled), len(pickler.strings)) + pickled)
    for text in pickler.strings:
        encoded = text.encode()
        link.sendall(_LENGTHS.pack(len(encoded), 0))
        link.sendall(encoded)


def _receive_long(link: socket.socket) -> Any:
    """Return what `_send_long` has sent; between two of its long strings other threads can run."""
    num_pickled, num_strings = _LENGTHS.unpack(receive_exactly(link, _LENGTHS.size))
    pickled, strings = receive_exactly(link, num_pickled), []
    for _ in range(num_strings):
        num_bytes, _ = _LENGTHS.unpack(receive_exactly(link, _LENGTHS.size))
        strings.append(receive_exactly(link, num_bytes).decode())
    return _Unpickler(pickled, strings).load()


def split(items: list[Any]) -> Iterator[tuple[int, bytes]]:
    """Yield the items in pickles of about `PIECE_BYTES`: the number of items, and the pickle of their list."""
    start, size = 0, 0
    for end, item in enumerate(items, 1):
        size += len(pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL))
        if size >= PIECE_BYTES:
            yield end - start, pickle.dumps(items[start:end], protocol=pickle.HIGHEST_PROTOCOL)
            start, size = end, 0
    if start < len(items):
        yield len(items) - start, pickle.dumps(items[start:], protocol=pickle.HIGHEST_PROTOCOL)


def serve(link: socket.socket) -> None:
    """Do the jobs of the proxy at the other end until it closes the link."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            num_job, num_data = _LENGTHS.unpack(receive_exactly(link, _LENGTHS.size))
            function, options = pickle.loads(receive_exactly(link, num_job))  # noqa: S301  from our own process
            try:
                result = function(receive_exactly(link, num_data), **options)
            except TurnwiseError as refusal:
                result = refusal
            _send(link, result)


def _send(link: socket.socket, result: Any) -> None:
    is_long = isinstance(result, Result)
    head = pickle.dumps(Result(None, []) if is_long else result, protocol=pickle.HIGHEST_PROTOCOL)
    data = result.data if is_long else b""
    link.sendall(_LENGTHS.pack(len(head), len(data)) + head)
    link.sendall(data)
    if is_long:
        for num_items, piece in split(result.items):
            link.sendall(_LENGTHS.pack(len(piece), num_items))
            link.sendall(piece)
            if len(piece) > LONG_PIECE_BYTES:
                _send_long(link, pickle.loads(piece))  # noqa: S301  pickled here
        link.sendall(_LENGTHS.pack(*_END))
        _send_long(link, result.head)


def main() -> None:
    """Run as a process: its only argument is the descriptor of the socket to the proxy, which it inherits."""
    # A terminal's ctrl-C reaches the whole group; the proxy ends this process by closing the link.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))
