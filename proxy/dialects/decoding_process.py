"""A process beside the proxy for work that would hold the event loop: decoding requests of many megabytes.

Decoding JSON holds the interpreter's lock, so a thread would stop the event loop as long as the loop itself. Decoding
16 MiB of text takes 13 to 19 ms; to read the decoded request from another process takes 2 ms. The process starts with
the first such request, does one job at a time, and ends with the proxy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from turnwise.errors import ProxyUnavailable, TurnwiseError

log = logging.getLogger(__name__)
T = TypeVar("T")
JOB_SECONDS = 60.0
"""How long a job may take; the first one includes the start of the process."""
_LENGTHS = struct.Struct("<QQ")
"""Lengths of a job's pickle and of its data; of a result's pickle and zero."""


class DecodingProcess:
    """The process, and the jobs for it."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()
        self._link: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    async def do(self, function: Callable[..., T], data: bytes, **options: Any) -> T:
        """Call a function with the data in the other process; it must be importable by its name.

        Raises:
            ProxyUnavailable: the process ended or did not answer.
            TurnwiseError: what the function raises.
        """
        async with self._lock:
            try:
                result = await asyncio.to_thread(self._call, pickle.dumps((function, options)), data)
            except (OSError, EOFError) as error:
                log.warning("the process that decodes long requests failed, another is started for the next: %s", error)
                await asyncio.to_thread(self.close)
                raise ProxyUnavailable(
                    "the process that decodes long requests failed; nothing was sampled, retry"
                ) from error
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
        length, _ = _LENGTHS.unpack(_receive(link, _LENGTHS.size))
        return pickle.loads(_receive(link, length))  # noqa: S301  from our own process

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
        ours.settimeout(JOB_SECONDS)
        self._link = ours
        return ours


def _receive(link: socket.socket, length: int) -> bytearray:
    """Return exactly so many bytes.

    Raises:
        EOFError: the other end has closed the link.
    """
    found = bytearray(length)
    rest = memoryview(found)
    while rest:
        received = link.recv_into(rest)
        if not received:
            raise EOFError("the link is closed")
        rest = rest[received:]
    return found


def serve(link: socket.socket) -> None:
    """Do the jobs of the proxy at the other end until it closes the link."""
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            num_job, num_data = _LENGTHS.unpack(_receive(link, _LENGTHS.size))
            function, options = pickle.loads(_receive(link, num_job))  # noqa: S301  from our own process
            try:
                result = function(bytes(_receive(link, num_data)), **options)
            except TurnwiseError as refusal:
                result = refusal
            raw = pickle.dumps(result, protocol=pickle.HIGHEST_PROTOCOL)
            link.sendall(_LENGTHS.pack(len(raw), 0))
            link.sendall(raw)


def main() -> None:
    """Run as a process: its only argument is the descriptor of the socket to the proxy, which it inherits."""
    # A terminal's ctrl-C reaches the whole group; the proxy ends this process by closing the link.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(socket.socket(fileno=int(sys.argv[1])))
