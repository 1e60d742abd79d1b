"""The reply of a stream: what it keeps in memory, and its comments."""

from __future__ import annotations

import asyncio
import gc
import weakref

from starlette.types import Message, Send

from proxy.dialects.chat import ChatCompletions
from proxy.routes.reply_sender import KEEP_ALIVE, ReplySender


def reply_to(send: Send) -> ReplySender:
    dialect = ChatCompletions()
    reply = ReplySender(send, dialect)
    reply.call = dialect.parse({"messages": [], "stream": True}, max_choices=1, max_messages=1)
    return reply


async def test_the_events_of_a_stream_are_freed_without_a_garbage_collection() -> None:
    async def send(_: Message) -> None:
        """Send nothing."""

    gc.disable()
    try:
        reply = reply_to(send)
        with reply.kept_alive(60.0):
            await reply.part(b"data: {}\n\n")
        freed = weakref.ref(reply)
        del reply
        assert freed() is None
    finally:
        gc.enable()


async def two_comments(sent: list[bytes]) -> None:
    """Keep a stream alive until it has sent two comments, which the list receives."""
    has_two = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if sent.count(KEEP_ALIVE) == 2:
            has_two.set()

    async with asyncio.timeout(60):
        with reply_to(send).kept_alive(0.01):
            await has_two.wait()


async def test_a_silent_stream_gets_comments_until_it_ends() -> None:
    ended: list[bytes] = []
    await two_comments(ended)
    num_sent = len(ended)
    await two_comments([])  # meanwhile the ended stream would get as many
    assert len(ended) == num_sent
