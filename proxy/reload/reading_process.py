"""The process that reads versions' files: each read has a thread there, so one that hangs holds up no other.

It maps files into memory, and an error of a network file system, or a file that becomes shorter, ends a process then
with SIGBUS: this one, and no call. The proxy starts another one, and reads again.
"""

from __future__ import annotations

import contextlib
import functools
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import proxy.reload.checkpoint  # noqa: F401  is loaded before the first read
from proxy.writer.frames import Link, frame
from turnwise.errors import BadCheckpoint

READ_BYTES = 2**16


def serve(link: socket.socket) -> None:
    """Read what the proxy at the other end asks for until it closes the link."""
    lock = threading.Lock()

    def start(asked: tuple[int, Callable[[], Any]]) -> None:
        threading.Thread(target=functools.partial(_answer, link, lock, *asked), daemon=True).start()

    frames = Link(start)
    while data := link.recv(READ_BYTES):
        frames.data_received(data)


def _answer(link: socket.socket, lock: threading.Lock, number: int, read: Callable[[], Any]) -> None:
    result, failure = None, None
    try:
        result = read()
    except Exception as error:  # noqa: BLE001  whoever asked gets it
        failure = error
    try:
        answer = frame((number, result, failure, _system_error(failure)))
    except Exception as error:  # noqa: BLE001  the result, or the error, cannot be sent
        answer = frame((number, None, RuntimeError(f"{failure or result!r:.500} cannot be sent: {error}"), None))
    with lock, contextlib.suppress(ConnectionError):  # the proxy was killed
        link.sendall(b"".join(answer))


def _system_error(failure: BaseException | None) -> OSError | None:
    """Return the error of the system that ended a read, also as the cause of a `BadCheckpoint`; None without one."""
    cause = failure.__cause__ if isinstance(failure, BadCheckpoint) else failure
    return cause if isinstance(cause, OSError) else None


def main() -> None:
    """Run as a process: its only argument is the descriptor of the socket to the proxy, which it inherits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ctrl-C reaches the whole group; the proxy ends this
    with contextlib.suppress(ConnectionError):
        serve(socket.socket(fileno=int(sys.argv[1])))
