"""Long requests that begin with the messages of an earlier request of the same caller.

An agent repeats its whole conversation with every call. The part up to the end of the last message is recognised by a
hash of its bytes. Then only the bytes after it are decoded, and what was derived from the earlier messages is used
again; the messages themselves are not kept (see `proxy.dialects.repeated_messages`). The same pass over the bytes gives
the digest of the whole request. A request with much that is new is decoded in another process (see
`proxy.dialects.decoding_process`), which also digests its messages.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import orjson
from blake3 import blake3

from proxy.dialects.decoding_process import DecodingProcess, Result
from proxy.dialects.object_sizes import all_json_bytes, json_bytes
from proxy.dialects.repeated_messages import DecodeMessages, RepeatedMessages, are_messages
from proxy.http.asgi import check_limits, decode_object
from turnwise.json_scan import check_parts, scan
from turnwise.types import Json

MIN_BYTES = 64 * 2**10
"""Shorter requests are decoded as a whole."""
DECODED_HERE_BYTES = 2**20
DECODED_HERE_STRINGS = 8_192
"""A request with more new bytes, or with more strings in them, is decoded in another process."""
MAX_PART_STRINGS = 20_000
"""Default of `max_json_part_strings`."""
HASHED_HERE_BYTES = 8 * 2**20
"""Longer requests are hashed in a thread, without the interpreter's lock."""
DIGEST_BYTES = 16
REQUEST_BYTES = 3_000
"""Memory of a known request without messages and head: most of it is for the running hashes of its history."""
MESSAGE_BYTES = 250
"""Memory of what is derived from one message, without the message of its outline."""
DECODED_AGAIN_BYTES = 5 * 2**20
"""Decoded messages that take more memory would take more than 5 ms to decode again. They are kept until they have
outlines; a conversation that grows past the limit without outlines is decoded once in the other process. A later call
that reads all messages has them decoded there too."""
TAIL_BYTES = 48
"""Bytes at the end of the known part that are compared before it is hashed."""
MAX_HASHED = 2
"""Known requests with an equal tail that are compared with one request."""
MESSAGES = re.compile(rb'"messages"\s*:\s*')
SPACE = b" \t\r\n"
_NEW = "new_messages_" + os.urandom(8).hex()
"""A field that no request has."""
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])

Caller = tuple[str, str]
"""A tenant and the id of an API key."""


class MessageFacts(NamedTuple):
    """What the other process finds out about messages."""

    digests: list[bytes]
    """One per message."""
    num_text: int
    """As `KnownRequest.num_text`."""
    num_readable: int
    """As `KnownRequest.num_readable`."""
    num_bytes: int
    """Memory of the messages."""


@dataclasses.dataclass(slots=True, eq=False)
class KnownRequest:
    """A request up to the end of its last message."""

    num_bytes: int
    digest: bytes
    tail: bytes
    start: int
    """Where the array of the messages begins."""
    head: Json
    """The fields before `messages`."""
    num_messages: int = 0
    kept: list[Json] | None = None
    """The messages; None if they are decoded again when they are needed."""
    history: Any = None
    """The `History` of the messages; None until it is computed."""
    outlines: Any = None
    """The `Outlines` of the messages; None until they are needed."""
    digests: list[bytes] = dataclasses.field(default_factory=list)
    """The digests of the messages, where another process has computed them."""
    digest_fields: frozenset[str] | None = None
    """The `MessageReader.fields` of `digests`."""
    num_text: int = 0
    """Messages, from the first on, that were found to have no media."""
    num_readable: int = 0
    """Messages, from the first on, in which the arguments of all tool calls were found to be objects."""
    num_counted: int = 0
    """Messages, from the first on, whose memory has been counted."""
    num_message_bytes: int = 0
    """The memory of these."""
    num_plain_bytes: int = 0
    """The memory of the messages that had no outline when the request was read."""
    call_ids: tuple[int, frozenset[str]] = (0, frozenset())
    """A number of messages, from the first on, and the ids of their tool calls."""
    num_calls: tuple[int, int] = (0, 0)
    """A number of messages, from the first on, and the number of their tool calls."""
    num_long: int = 0
    """Messages, from the first on, that were found to have enough text to be left out of the engine's request."""

    def count(self, messages: Sequence[Json]) -> bool:
        """Set the number and the memory of the messages.

        Returns:
            Whether to keep them: it would take long to decode them again, and they have no outlines yet.
        """
        num_new_bytes = all_json_bytes(messages[self.num_counted :])
        has_outlines = self.outlines is not None and 0 < self.num_counted <= len(self.outlines)
        self.num_plain_bytes = num_new_bytes + (0 if has_outlines else self.num_plain_bytes)
        self.num_message_bytes += num_new_bytes
        self.num_counted = self.num_messages = len(messages)
        return self.is_long and not has_outlines

    @property
    def is_long(self) -> bool:
        """Whether decoding the messages again would hold the event loop."""
        return self.num_message_bytes > DECODED_AGAIN_BYTES

    def count_memory(self) -> int:
        """Return the memory of the request at most: a message whose outline is yet to be made counts as a whole."""
        outlines = self.num_plain_bytes + (0 if self.outlines is None else self.outlines.num_bytes)
        num_bytes = REQUEST_BYTES + json_bytes(self.head) + outlines + self.num_messages * MESSAGE_BYTES
        return num_bytes if self.kept is None else num_bytes + self.num_message_bytes


class MessageReader(NamedTuple):
    """How the other process reads messages."""

    function: Callable[[list[Json], frozenset[str]], MessageFacts]
    """Importable by its name."""
    fields: frozenset[str]
    """Its second argument."""

    def read_into(self, known: KnownRequest, messages: list[Json]) -> None:
        """Put what is found out about messages into `known`."""
        facts = self.function(messages, self.fields)
        known.digests, known.num_text, known.num_readable = facts.digests, facts.num_text, facts.num_readable
        known.digest_fields = self.fields
        known.num_counted = len(messages)
        known.num_message_bytes = known.num_plain_bytes = facts.num_bytes
        known.num_messages = len(messages)


class ReadRequest(NamedTuple):
    """A decoded request."""

    body: Json
    digest: bytes
    """Of all bytes."""
    known: KnownRequest | None
    """What a later request is recognised by, with what was derived from an earlier one; None where it cannot be."""
    messages_json: memoryview | None
    """The bytes of the messages, without the bracket that closes the array."""
    pieces: tuple[tuple[int, bytes], ...] = ()
    """The messages as the other process has sent them: `Result.pieces`."""


class _Rest(NamedTuple):
    """What follows the known part of a request."""

    body: Json
    end: int


class KnownRequests:
    """The last request of each conversation, up to an amount of memory; the least recently used ones are dropped."""

    def __init__(self, max_bytes: int, decoder: DecodingProcess, *, max_part_strings: int = MAX_PART_STRINGS) -> None:
        self._max_bytes = max_bytes
        self._max_part_strings = max_part_strings
        self._decoder = decoder
        self.num_bytes = 0
        """Memory of all known requests, roughly."""
        self.num_bytes_read = 0
        """Bytes of all requests so far."""
        self._by_caller: dict[Caller, dict[KnownRequest, None]] = {}
        self._order: collections.OrderedDict[KnownRequest, tuple[Caller, int]] = collections.OrderedDict()
        """The caller and the memory of each request, the least recently used one first."""

    async def read(
        self,
        caller: Caller,
        raw: bytes,
        *,
        reader: MessageReader | None = None,
        **limits: int,
    ) -> ReadRequest:
        """Decode a request; messages that are decoded in the other process are digested there.

        Args:
            caller: whose earlier requests it may begin with.
            raw: the request.
            reader: what reads the messages in the other process.
            limits: of `proxy.http.asgi.check_limits`, for what must be decoded.

        Raises:
            InvalidRequest: it is not a JSON object.
            TooLarge: what must be decoded exceeds a limit.
            ProxyUnavailable: the other process failed.
        """
        self.num_bytes_read += len(raw)
        earlier, hashed = await self._find(caller, raw)
        rest: _Rest | None = None
        pieces: tuple[tuple[int, bytes], ...] = ()
        if earlier is not None and len(raw) - earlier.num_bytes <= DECODED_HERE_BYTES:
            decode = functools.partial(self._decode_messages, caller[0]) if earlier.is_long else None
            rest = await _read_rest(raw, earlier, limits, decode)
        if rest is not None and earlier is not None:
            body, end = rest
            known = dataclasses.replace(earlier, num_bytes=end)
        elif await is_decoded_elsewhere(raw, limits):
            decoded = await self._decoder.do(
                caller[0], _decode, raw, reader=reader, limits=limits, max_part_strings=self._max_part_strings
            )
            (body, known), messages, _, pieces = decoded
            if known.num_bytes:
                body["messages"] = messages
        else:
            body, known = decode_object(raw), _locate_messages(raw)
        end = known.num_bytes
        start = earlier.num_bytes if earlier is not None else 0
        if not start <= end:
            end, start, hashed = 0, 0, blake3()
        part, of_all = await _hash(hashed, memoryview(raw), start, end)
        if not end or not are_messages(body.get("messages")):
            return ReadRequest(body, of_all, None, None)
        known.digest, known.tail = part, raw[max(0, end - TAIL_BYTES) : end]
        await self._keep(caller[0], known, body, memoryview(raw)[known.start : end])
        self._replace(caller, earlier if rest is not None else None, known)
        return ReadRequest(body, of_all, known, memoryview(raw)[known.start : end], pieces)

    async def _find(self, caller: Caller, raw: bytes) -> tuple[KnownRequest | None, Any]:
        """Return the longest known request that this one begins with, and the hash after its bytes."""
        alike = [
            known
            for known in self._by_caller.get(caller, ())
            if known.num_bytes <= len(raw) and raw.endswith(known.tail, 0, known.num_bytes)
        ]
        alike.sort(key=lambda known: known.num_bytes, reverse=True)
        for known in alike[:MAX_HASHED]:
            hashed = blake3()
            part, _ = await _hash(hashed, memoryview(raw)[: known.num_bytes], 0, known.num_bytes)
            if part == known.digest:
                return known, hashed
        return None, blake3()

    async def _keep(self, tenant: str, known: KnownRequest, body: Json, messages_json: memoryview) -> None:
        """Keep the messages if they are to be kept; those that are not decoded are decoded in the other process."""
        known.kept = None
        if known.count(body["messages"]):
            if isinstance(body["messages"], RepeatedMessages):
                body["messages"] = await self._decode_messages(tenant, b"".join((messages_json, b"]")))
            known.kept = body["messages"]

    async def _decode_messages(self, tenant: str, array: bytes) -> list[Json]:
        """Decode known messages in the other process."""
        return (await self._decoder.do(tenant, _decode_array, array)).items

    def _replace(self, caller: Caller, earlier: KnownRequest | None, known: KnownRequest) -> None:
        if earlier is not None:
            self._drop(earlier)
        self._by_caller.setdefault(caller, {})[known] = None
        num_bytes = known.count_memory()
        self._order[known] = caller, num_bytes
        self.num_bytes += num_bytes
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._order)))

    def _drop(self, known: KnownRequest) -> None:
        caller, num_bytes = self._order.pop(known, (None, 0))
        if caller is None:
            return
        self.num_bytes -= num_bytes
        of_caller = self._by_caller[caller]
        del of_caller[known]
        if not of_caller:
            del self._by_caller[caller]


async def _hash(hashed: Any, raw: memoryview, start: int, end: int) -> tuple[bytes, bytes]:
    """Continue a hash from `start`; return the digests at `end` and after all bytes."""

    def update() -> tuple[bytes, bytes]:
        hashed.update(raw[start:end])
        part = hashed.digest(DIGEST_BYTES)
        if end < len(raw):
            hashed.update(raw[end:])
        return part, hashed.digest(DIGEST_BYTES)

    return await asyncio.to_thread(update) if len(raw) - start > HASHED_HERE_BYTES else update()


async def is_decoded_elsewhere(raw: bytes, limits: Mapping[str, int]) -> bool:
    """Return whether a request is to be decoded in the other process, which then checks its limits.

    Raises:
        TooLarge: a request that is not exceeds a limit.
    """
    return len(raw) > DECODED_HERE_BYTES or await check_limits(raw, **limits) > DECODED_HERE_STRINGS


async def digest_of(raw: bytes) -> bytes:
    """Return the digest of a request."""
    _, of_all = await _hash(blake3(), memoryview(raw), 0, 0)
    return of_all


def _decode(raw: bytes, *, limits: Mapping[str, int], reader: MessageReader | None, max_part_strings: int) -> Result:
    """Decode a request; return it with the place of its messages and what the reader finds out.

    The messages are the result's items; where they are not found or not valid, they stay in the request.
    """
    scan(raw, **limits)
    body, known = decode_object(raw), _locate_messages(raw)
    check_parts(body, max_part_strings)
    messages: list[Json] = body["messages"] if are_messages(body.get("messages")) else []
    if not messages:
        known.num_bytes = 0
    if not known.num_bytes:
        return Result((body, known), [])
    if reader is not None:
        reader.read_into(known, messages)
    return Result(({**body, "messages": []}, known), messages)


def _decode_array(array: bytes) -> Result:
    """Decode messages whose limits were checked when they were new."""
    return Result(None, orjson.loads(array))


async def _read_rest(
    raw: bytes, earlier: KnownRequest, limits: Mapping[str, int], decode: DecodeMessages | None
) -> _Rest | None:
    """Decode what follows the known messages; None where the request must be decoded as a whole.

    The rest of the request is made a complete object, whose first field is the list of the new messages.
    """
    rest = raw[earlier.num_bytes :].lstrip(SPACE)
    has_more = rest[:1] == b","
    if not (has_more or rest[:1] == b"]") or _NEW.encode() in rest:
        return None
    begin = b'{"%b":' % _NEW.encode()
    text = begin + b"[" + (rest[1:] if has_more else rest)
    if await check_limits(text, **limits) > DECODED_HERE_STRINGS:
        return None
    try:
        fields: Json = orjson.loads(text)
        num_array = len(bytes(_fields.decode(text)[_NEW]))
    except (orjson.JSONDecodeError, msgspec.DecodeError):
        return None  # decoding the whole request names the error
    new = fields.pop(_NEW)
    if "messages" in fields or bool(new) != has_more or not are_messages(new):
        return None
    known_json = memoryview(raw)[earlier.start : earlier.num_bytes]
    body = {**earlier.head, "messages": [], **fields}
    if earlier.kept is None:
        body["messages"] = RepeatedMessages(earlier.num_messages, known_json, new, decode)
    else:
        body["messages"] = earlier.kept + new
    return _Rest(body, _end_of_last(raw, len(raw) - len(text) + len(begin) + num_array))


def _locate_messages(raw: bytes) -> KnownRequest:
    """Return the place of the messages and the fields before them; `num_bytes` is 0 where they are not found."""
    nowhere = KnownRequest(0, b"", b"", 0, {})
    found = MESSAGES.search(raw)
    if found is None:
        return nowhere
    try:
        head = orjson.loads(raw[: found.start()] + b'"messages":0}')
        array = bytes(_fields.decode(raw)["messages"])
    except (orjson.JSONDecodeError, msgspec.DecodeError, KeyError):
        return nowhere
    if not array.startswith(b"[") or not raw.startswith(array, found.end()) or head.pop("messages") != 0:
        return nowhere
    end = _end_of_last(raw, found.end() + len(array))
    return KnownRequest(end, b"", b"", found.end(), head)


def _end_of_last(raw: bytes, end: int) -> int:
    """Return the end of the last message of an array that ends at `end`; 0 if the array is empty."""
    end -= 1
    while raw[end - 1 : end] in (b" ", b"\t", b"\r", b"\n"):
        end -= 1
    return end if raw[end - 1 : end] == b"}" else 0
