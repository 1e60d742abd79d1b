"""Objects in a byte stream between two processes of one release: the length of each one's pickle, and the pickle."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct("<Q")


def frame(content: object) -> list[bytes]:
    """Return the wire form of an object, length and pickle, for the two processes of one release."""
    pickled = pickle.dumps(content, protocol=pickle.HIGHEST_PROTOCOL)
    return [_LENGTH.pack(len(pickled)), pickled]


def receive(link: socket.socket) -> Any:
    """Wait for the next object, and read nothing of what follows it; the socket is blocking."""
    (length,) = _LENGTH.unpack(link.recv(_LENGTH.size, socket.MSG_WAITALL))
    return pickle.loads(link.recv(length, socket.MSG_WAITALL))  # noqa: S301  our own


class Link(asyncio.Protocol):
    """Decodes the frames that another process sends: of an event loop's socket, or of a reader that waits itself."""

    def __init__(self, take: Callable[[Any], None], end: Callable[[], None] = lambda: None) -> None:
        """`take` gets each object, and `end` is called once the event loop has lost the connection."""
        self._take = take
        self._end = end
        self._parts: list[bytes] = []
        self._num_missing = 0
        """Bytes until the next frame may be whole: parts of a long one are joined only once."""

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._num_missing -= len(data)
        if self._num_missing > 0:
            return
        received = b"".join(self._parts)
        found: list[Any] = []
        begin, end = 0, _LENGTH.size
        while end <= len(received):
            (length,) = _LENGTH.unpack_from(received, begin)
            end = begin + _LENGTH.size + length
            if end <= len(received):
                found.append(pickle.loads(memoryview(received)[begin + _LENGTH.size : end]))  # noqa: S301  our own
                begin, end = end, end + _LENGTH.size
        self._parts = [received[begin:]] if begin < len(received) else []  # an empty part would make the next a copy
        self._num_missing = end - len(received)
        for each in found:
            self._take(each)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  the protocol's signature
        self._end()
