"""The head of a reply leaves with a short body in one piece, and before a long one without a copy."""

from __future__ import annotations

import asyncio

import pytest

from proxy.http.connections import COPIED_BYTES, ReplyTransport

HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
LONG = b"x" * (COPIED_BYTES + 1)


class Sent:
    """A transport that keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.parts.append(data)

    def is_closing(self) -> bool:
        return False


@pytest.mark.parametrize(("body", "parts"), [(b"short", [HEAD + b"short"]), (LONG, [HEAD, LONG]), (None, [HEAD])])
async def test_a_long_body_is_not_copied(body: bytes | None, parts: list[bytes]) -> None:
    sent = Sent()
    transport = ReplyTransport(sent, asyncio.get_running_loop())  # type: ignore[arg-type]  # has what is used
    transport.write(HEAD)
    if body is not None:
        transport.write(body)
    await asyncio.sleep(0)
    assert sent.parts == parts
    assert body is not LONG or sent.parts[1] is LONG
