"""Objects in a byte stream between two processes of one release: the length of each one's pickle, and the pickle."""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

_LENGTH = struct.Struct("<Q")


class _Pieces(list[bytes]):
    """Collects a pickle in pieces; each long text is a separate piece, so that it is not copied."""

    write = list.append


def frame(content: object) -> list[bytes]:
    """Return the wire form of an object, length and pickle, for the two processes of one release."""
    pieces = _Pieces()
    pickle.Pickler(pieces, protocol=pickle.HIGHEST_PROTOCOL).dump(content)
    return [_LENGTH.pack(sum(map(len, pieces))), *pieces]


def receive_exactly(link: socket.socket, length: int) -> bytes:
    """Return exactly so many bytes; the kernel fills them without the interpreter's lock.

    Raises:
        EOFError: the other end has closed the link.
    """
    found = b""
    while len(found) < length:
        received = link.recv(length - len(found), socket.MSG_WAITALL)
        if not received:
            raise EOFError("the link is closed")
        found = received if not found else found + received
    return found


def receive_one(link: socket.socket) -> Any:
    """Return the next object from a blocking socket; what follows it stays in the socket.

    Raises:
        EOFError: the other end has closed the link.
    """
    (length,) = _LENGTH.unpack(receive_exactly(link, _LENGTH.size))
    return pickle.loads(receive_exactly(link, length))  # noqa: S301  from our own process


class Frames:
    """Decodes a byte stream of frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add data; return the objects that are complete."""
        if not self._pending:  # most frames arrive whole and need not be copied
            found, at = _decode(data)
            self._pending += memoryview(data)[at:]
            return found
        self._pending += data
        found, at = _decode(self._pending)
        del self._pending[:at]
        return found


def _decode(data: bytes | bytearray) -> tuple[list[Any], int]:
    """Return the objects of the whole frames at the beginning of the data, and the length of these frames."""
    found: list[Any] = []
    at = 0
    with memoryview(data) as view:
        while len(view) >= at + _LENGTH.size:
            (length,) = _LENGTH.unpack_from(view, at)
            end = at + _LENGTH.size + length
            if len(view) < end:
                break
            with view[at + _LENGTH.size : end] as pickled:
                found.append(pickle.loads(pickled))  # noqa: S301  from our own process
            at = end
    return found, at
