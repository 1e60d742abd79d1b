"""Long requests in the formats that are translated: decoded, translated and digested in another process.

The messages of these requests are not those that the client sent, so no part of an earlier request can be used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import orjson

from proxy.dialects import registry
from proxy.dialects.base import Call, Dialect
from proxy.dialects.chat import with_readable_arguments
from proxy.dialects.decoding_process import DecodingProcess, Result
from proxy.dialects.known_requests import MAX_PART_STRINGS, KnownRequest, MessageReader
from proxy.dialects.repeated_messages import message_list
from proxy.http.asgi import decode_object
from turnwise.json_scan import CONVERSATION_FIELDS, check_parts, scan
from turnwise.types import Json, JsonText

NESTED_REQUEST = "generateContentRequest"
"""Field of a request to count tokens, in Google's format, that may hold the request whose prompt is counted."""
UNREPEATED_FIELDS = frozenset({*CONVERSATION_FIELDS, NESTED_REQUEST})
"""Fields of a request to count tokens that hold its conversation; only the chat call keeps them."""


class LongRequest(NamedTuple):
    """A request without its body."""

    tenant: str
    dialect: str
    path: str
    """Of the route."""
    parameters: Mapping[str, str]
    """Of the path."""
    query: Mapping[str, str]
    limits: Mapping[str, int]
    max_choices: int
    max_messages: int
    max_part_strings: int = MAX_PART_STRINGS

    def decode(self, raw: bytes) -> tuple[Dialect, Json]:
        """Return the dialect and the decoded request.

        Raises:
            InvalidRequest: it is not a JSON object.
            TooLarge: it exceeds a limit.
        """
        scan(raw, **self.limits)
        decoded = decode_object(raw)
        for each in _requests(decoded):
            check_parts(each, self.max_part_strings)
        dialect = next(each for each in registry.DIALECTS if each.name == self.dialect)
        route = next(each for each in dialect.routes if each.path == self.path)
        return dialect, dialect.merge_url(decoded, route, self.parameters, self.query)

    def parse(self, dialect: Dialect, body: Json) -> Call:
        """Return the call that a decoded request asks for.

        Raises:
            InvalidRequest: naming the field and what is wrong with it.
        """
        return dialect.parse(body, max_choices=self.max_choices, max_messages=self.max_messages)


async def read_call(
    decoder: DecodingProcess, raw: bytes, request: LongRequest, reader: MessageReader
) -> tuple[Call | None, Json]:
    """Return the call; or None and the request, where it refers to stored turns, which must be read first.

    Raises:
        InvalidRequest: naming the field and what is wrong with it.
        TooLarge: it exceeds a limit.
        ProxyUnavailable: the other process failed.
    """
    result = await decoder.do(request.tenant, _read, raw, request=request, reader=reader)
    call, body = result.head
    if call is not None:
        _complete(call, result)
    return call, body


async def read_counted_call(decoder: DecodingProcess, raw: bytes, request: LongRequest, reader: MessageReader) -> Call:
    """Return the chat call whose prompt a request to count tokens asks for.

    Raises:
        InvalidRequest: naming the field and what is wrong with it.
        TooLarge: it exceeds a limit.
        ProxyUnavailable: the other process failed.
    """
    result = await decoder.do(request.tenant, _read_counted, raw, request=request, reader=reader)
    call: Call = result.head
    _complete(call, result)
    return call


def counted_call(dialect: Dialect, body: Json, max_messages: int) -> Call:
    """Return the chat call whose prompt a decoded request to count tokens asks for.

    Raises:
        InvalidRequest: naming the field and what is wrong with it.
    """
    chat = registry.DIALECTS[0]
    call = chat.parse(dialect.count_request(body), max_choices=1, max_messages=max_messages)
    call.original = {field: value for field, value in body.items() if field not in UNREPEATED_FIELDS}
    return call


def _complete(call: Call, result: Result) -> None:
    """Put back into a call what came beside it: its messages and their JSON, or the JSON of its prompt."""
    if call.known is not None:
        call.body["messages"] = call.messages = result.items
        call.messages_json, call.pieces = memoryview(result.data), result.pieces
    elif result.data:
        call.body["prompt"] = JsonText(result.data)


def _requests(body: Json) -> list[Json]:
    """Return a request without the one that it nests, and that one."""
    nested = body.get(NESTED_REQUEST)
    if not isinstance(nested, dict):
        return [body]
    return [{field: value for field, value in body.items() if field != NESTED_REQUEST}, nested]


def _read(raw: bytes, *, request: LongRequest, reader: MessageReader) -> Result:
    dialect, body = request.decode(raw)
    if dialect.referenced_turns(body):
        return Result((None, body), [])
    call = request.parse(dialect, body)
    return _result((call, {}), call, reader)


def _read_counted(raw: bytes, *, request: LongRequest, reader: MessageReader) -> Result:
    call = counted_call(*request.decode(raw), request.max_messages)
    return _result(call, call, reader)


def _result(head: object, call: Call, reader: MessageReader) -> Result:
    """Return a call in a result's head; its messages are the items, or the JSON of its prompt is the data."""
    messages = message_list(call.messages)
    if not messages:
        prompt = call.body.pop("prompt", None)
        return Result(head, [], b"" if prompt is None else orjson.dumps(prompt))
    call.known = KnownRequest(0, b"", b"", 0, {})
    reader.read_into(call.known, messages)
    call.known.num_readable = len(messages)
    call.messages, call.body["messages"] = [], []
    return Result(head, messages, orjson.dumps(with_readable_arguments(messages))[:-1])


async def digest_call(
    decoder: DecodingProcess, raw: bytes, request: LongRequest, digest: Callable[[Call], bytes]
) -> bytes:
    """Return the digest that a function, importable by its name, computes of the call.

    Raises:
        ProxyUnavailable: the other process failed.
    """
    return await decoder.do(request.tenant, _digest, raw, request=request, digest=digest)


def _digest(raw: bytes, *, request: LongRequest, digest: Callable[[Call], bytes]) -> bytes:
    return digest(request.parse(*request.decode(raw)))
