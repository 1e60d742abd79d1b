"""Requests as ASGI: bodies under limits before they are decoded, clients that leave, headers that name a session."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import msgspec
import orjson
from starlette.types import Message, Receive, Send

from turnwise.errors import ClientLeft, InvalidRequest, TooLarge, TooSlow
from turnwise.json_text import loads, scan
from turnwise.types import Json

OWN = b"x-session-id"
PARENT = b"x-parent-session-id"
"""What opencode sends with the calls of a sub-agent, whose `X-Session-Id` is its own."""
CLAUDE_SESSION = b"x-claude-code-session-id"
CODEX_SESSION = (b"session-id", b"session_id")
THREAD = b"thread-id"
LITELLM_SESSION = b"x-litellm-session-id"
AFFINITY = (b"x-session-affinity", b"x-affinity")
SESSION_HEADERS = (PARENT, OWN, CLAUDE_SESSION, *CODEX_SESSION, THREAD, LITELLM_SESSION, *AFFINITY)
"""All of them; of several in one request, the first of this list counts."""


JSON = b"application/json"
MAX_DEPTH = 128
MAX_CONTAINERS = 32_768
"""Maximum number of arrays and objects in a request body: decoding them is what a body costs."""
MAX_STRINGS = 131_072
"""Maximum number of strings in a request body, keys included."""
SCANNED_HERE_BYTES = 32 * 2**10
"""Longer bodies are scanned in a thread."""
JOINED_HERE_BYTES = 4 * 2**20
"""Longer bodies are joined in a thread, without the interpreter's lock. It takes 0.1 ms of CPU to use a thread, and 0.1
ms to join a megabyte."""
DECODED_HERE_BYTES = 4 * 2**20
DECODED_HERE_STRINGS = 32_768
"""A body with more bytes or strings is decoded in a thread, item by item."""
SHORT_DIGITS = 5
"""A call's body is short if its declared length has no more digits: the connection has received it by then."""
LEAST_BYTES_PER_SECOND = 1024
PATIENCE_SECONDS = 10.0
"""How long a begun body may bring nothing; what it brings restores the time at the least rate."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


@contextlib.contextmanager
def cancelled_when_client_leaves(left: asyncio.Future[None]) -> Iterator[None]:
    """Cancel the block when the client closes its connection, whatever the block waits for.

    Raises:
        ClientLeft: in place of the cancellation.
    """
    task = asyncio.current_task()

    def cancel(_: asyncio.Future[None]) -> None:
        if task is not None:
            task.cancel()

    left.add_done_callback(cancel)
    try:
        yield
    except asyncio.CancelledError:
        if task is None or not left.done():
            raise
        task.uncancel()
        raise ClientLeft from None
    finally:
        task = None  # the callback may be scheduled already
        left.remove_done_callback(cancel)


class BodyMemory:
    """The memory of one body, which nobody counts here; `close`, or the end of its block, gives it back."""

    async def add(self, num_bytes: int) -> None:
        """Count bytes that have arrived, as soon as they fit."""

    def end(self) -> None:
        """Note that the body is whole."""

    def close(self) -> None:
        self.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


async def read_body(receive: Receive, *, max_bytes: int, memory: BodyMemory | None = None) -> bytes:
    """Return the whole request body. The connection limits the time that it may take (see `proxy.http.connections`).

    Args:
        receive: gives its parts.
        max_bytes: the most that it may have.
        memory: what its bytes are counted in; None for a short body.

    Raises:
        TooLarge: it is longer than `max_bytes`.
        TooSlow: it has begun, and arrives too slowly.
        InvalidRequest: the client disconnected before it was complete.
    """
    parts: list[bytes] = []
    num_bytes, has_more, patience = 0, True, PATIENCE_SECONDS
    while has_more:
        if not parts:
            message = await receive()
        else:
            message, patience = await _receive_in_time(receive, patience, len(parts[-1]))
        if message["type"] == "http.disconnect":
            raise InvalidRequest("the client disconnected before its request was complete")
        part: bytes = message.get("body", b"")
        has_more = bool(message.get("more_body"))
        num_bytes += len(part)
        if num_bytes > max_bytes:
            raise TooLarge(f"the request body is larger than {max_bytes} bytes, which is the limit; send less")
        if memory is not None:
            await memory.add(len(part))
        parts.append(part)
    if memory is not None:
        memory.end()
    return parts[0] if len(parts) == 1 else await joined(parts, num_bytes)


async def _receive_in_time(receive: Receive, patience: float, num_new_bytes: int) -> tuple[Message, float]:
    """Return the next part of a body and the time that it may still bring nothing.

    The time in which the proxy does not read is not the client's.
    """
    patience = min(PATIENCE_SECONDS, patience + num_new_bytes / LEAST_BYTES_PER_SECOND)
    began = time.monotonic()
    try:
        async with asyncio.timeout(patience):
            message = await receive()
    except TimeoutError as error:
        raise TooSlow(
            f"the request body arrives more slowly than {LEAST_BYTES_PER_SECOND} bytes a second; send it again",
            code="request_timeout",
        ) from error
    return message, patience - (time.monotonic() - began)


async def joined(parts: list[bytes], num_bytes: int) -> bytes:
    """Return the joined parts of a body, which have so many bytes together."""
    return await asyncio.to_thread(_join, parts) if num_bytes > JOINED_HERE_BYTES else b"".join(parts)


def _join(parts: list[bytes]) -> bytes:
    """Return the joined parts; free them one by one, so that other threads can run in between."""
    joined = b"".join(parts)
    while parts:
        parts.pop()
    return joined


async def parse_object(raw: bytes, max_string_bytes: int) -> Json:
    """Decode a JSON object.

    Raises:
        InvalidRequest: it is not JSON, or not an object.
        TooLarge: it exceeds one of the limits.
    """
    num_strings = await check_limits(raw, max_string_bytes, MAX_STRINGS)
    is_long = len(raw) > DECODED_HERE_BYTES or num_strings > DECODED_HERE_STRINGS
    try:
        decoded = await asyncio.to_thread(decode_by_items, raw) if is_long else loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(
            f"the request body is not JSON: {error}; send a JSON object", code="invalid_json"
        ) from error
    if not isinstance(decoded, dict):
        raise InvalidRequest(
            f"the request body must be a JSON object, not {type(decoded).__name__}", code="invalid_json"
        )
    return decoded


def decode_by_items(raw: bytes) -> Any:
    """Decode a JSON object and the items of its arrays one by one: other threads run between them.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
    """
    try:
        return {name: _decode_array(value) for name, value in _fields.decode(raw).items()}
    except (msgspec.DecodeError, orjson.JSONDecodeError):
        return loads(raw)  # names the error, or is no object


def _decode_array(value: msgspec.Raw) -> Any:
    """Decode a value; the items of an array that consists of objects one by one."""
    text = bytes(value)
    if not text.startswith(b"[") or not text[1:].lstrip().startswith(b"{"):
        return loads(text)
    return [loads(item) for item in _items.decode(text)]


async def check_limits(raw: bytes, max_string_bytes: int, max_strings: int) -> int:
    """Check a JSON body before it is decoded; a long body is scanned in a thread, without the interpreter's lock.

    Returns:
        The number of its strings, keys included; 0 for a short body, which was not counted.

    Raises:
        TooLarge: it is nested deeper than `MAX_DEPTH`, or has more than `MAX_CONTAINERS` arrays and objects, or more
            than `max_strings` strings, or a string of more than `max_string_bytes`.
    """
    if len(raw) > min(SCANNED_HERE_BYTES, max_string_bytes):
        return await asyncio.to_thread(scan, raw, MAX_DEPTH, MAX_CONTAINERS, max_strings, max_string_bytes)
    has_few_strings = len(raw) <= max_strings or raw.count(b'"') <= max_strings
    num_containers = len(raw) - len(raw.translate(None, b"[{"))  # in less time than two counts
    is_short = has_few_strings and num_containers <= MAX_DEPTH
    return 0 if is_short else scan(raw, MAX_DEPTH, MAX_CONTAINERS, max_strings)


async def send_whole(
    send: Send, status: int, body: bytes, headers: dict[str, str] | None = None, content_type: bytes = JSON
) -> None:
    raw = [(b"content-type", content_type), (b"content-length", str(len(body)).encode())]
    raw += [(name.encode(), value.encode("latin-1")) for name, value in (headers or {}).items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
