"""Server-sent events as vLLM sends them: `data: …` and an empty line, cut anywhere by the network."""

from __future__ import annotations

from typing import Any

import orjson

DONE = b"[DONE]"
SEPARATOR = b"\n\n"
PREFIX = b"data: "


class EventBuffer:
    """Turns a byte stream into whole events' data."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of every event that is whole by now, without `data: `; other fields are dropped."""
        self._pending += data
        if b"\r" in self._pending:
            self._pending = self._pending.replace(b"\r\n", b"\n")
        if SEPARATOR not in self._pending:
            return []
        *whole, self._pending = self._pending.split(SEPARATOR)
        return [event[len(PREFIX) :] for event in whole if event.startswith(PREFIX)]

    @property
    def pending(self) -> bytes:
        """What has come of an event that is not whole yet."""
        return self._pending


def event(data: bytes) -> bytes:
    """Frame one event."""
    return PREFIX + data + SEPARATOR


def named_event(name: str, data: dict[str, Any]) -> bytes:
    """Frame one event of a format that names its events, and repeats the name in the data."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps({"type": name, **data}))


class Verbatim:
    """Writes a stream as the engine does."""

    __slots__ = ()

    def chunks(self, chunks: list[bytes]) -> bytes:
        """Frame chunks."""
        return b"".join([PREFIX + chunk + SEPARATOR for chunk in chunks])

    def done(self) -> bytes:
        """Frame the end."""
        return event(DONE)

    def error(self, body: bytes) -> bytes:
        """Frame an error."""
        return event(body)
