"""Server-sent events as vLLM sends them: `data: …` and an empty line; the network may split them anywhere."""

from __future__ import annotations

import re
from typing import Any

from turnwise.json_text import dumps

DONE = b"[DONE]"
CONTENT_TYPE = "text/event-stream; charset=utf-8"
SEPARATOR = b"\n\n"
COMMENT = b": keep-alive\n\n"
"""Every client of server-sent events ignores it."""
PREFIX = b"data: "
BETWEEN = SEPARATOR + PREFIX
END = PREFIX + DONE + SEPARATOR
DATA = re.compile(rb"^data: (.*)$", re.MULTILINE)


class EventBuffer:
    """Splits a byte stream after its last complete line."""

    def __init__(self) -> None:
        self.pending: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes; return the data of the events that are now complete, without their other fields.

        Bytes that end no line are only kept: the event of a long prompt arrives in many parts.
        """
        if b"\n" not in data:
            self.pending.append(data)
            return []
        received = b"".join([*self.pending, data]) if self.pending else data
        if b"\r" in received:
            received = received.replace(b"\r\n", b"\n")
        lines, _, rest = received.rpartition(b"\n")
        self.pending = [rest] if rest else []
        return DATA.findall(lines)


def event(data: bytes) -> bytes:
    return PREFIX + data + SEPARATOR


def named_event(name: str, data: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps({"type": name, **data}))


class Verbatim:
    """Writes the engine's own events."""

    __slots__ = ()
    content_type = CONTENT_TYPE
    keep_alive = COMMENT

    def chunks(self, chunks: list[bytes]) -> bytes:
        return PREFIX + BETWEEN.join(chunks) + SEPARATOR if chunks else b""

    def done(self) -> bytes:
        return END

    def error(self, body: bytes) -> bytes:
        return event(body)
