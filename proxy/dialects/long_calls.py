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
from proxy.dialects.known_requests import KnownRequest, MessageReader
from proxy.http.asgi import decode_object
from turnwise.json_scan import scan
from turnwise.types import Json


class LongRequest(NamedTuple):
    """A request without its body."""

    dialect: str
    path: str
    """Of the route."""
    parameters: Mapping[str, str]
    """Of the path."""
    query: Mapping[str, str]
    limits: Mapping[str, int]
    max_choices: int
    max_messages: int

    def decode(self, raw: bytes) -> tuple[Dialect, Json]:
        """Return the dialect and the decoded request.

        Raises:
            InvalidRequest: it is not a JSON object.
            TooLarge: it exceeds a limit.
        """
        scan(raw, **self.limits)
        dialect = next(each for each in registry.DIALECTS if each.name == self.dialect)
        route = next(each for each in dialect.routes if each.path == self.path)
        return dialect, dialect.merge_url(decode_object(raw), route, self.parameters, self.query)

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
    (call, body), messages, messages_json, pieces = await decoder.do(_read, raw, request=request, reader=reader)
    if call is not None and call.known is not None:
        call.body["messages"] = call.messages = call.known.messages = messages
        call.messages_json, call.pieces = memoryview(messages_json), pieces
    return call, body


def _read(raw: bytes, *, request: LongRequest, reader: MessageReader) -> Result:
    dialect, body = request.decode(raw)
    if dialect.referenced_turns(body):
        return Result((None, body), [])
    call = request.parse(dialect, body)
    messages = call.messages
    if not messages:
        return Result((call, {}), [])
    call.known = KnownRequest(0, b"", b"", 0, {}, [])
    reader.read_into(call.known, messages)
    call.known.num_readable = len(messages)
    call.messages, call.body["messages"] = [], []
    return Result((call, {}), messages, orjson.dumps(with_readable_arguments(messages))[:-1])


async def digest_call(
    decoder: DecodingProcess, raw: bytes, request: LongRequest, digest: Callable[[Call], bytes]
) -> bytes:
    """Return the digest that a function, importable by its name, computes of the call.

    Raises:
        ProxyUnavailable: the other process failed.
    """
    return await decoder.do(_digest, raw, request=request, digest=digest)


def _digest(raw: bytes, *, request: LongRequest, digest: Callable[[Call], bytes]) -> bytes:
    return digest(request.parse(*request.decode(raw)))
