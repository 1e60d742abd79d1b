"""The reply of a stream: what it keeps in memory, and its comments."""

from __future__ import annotations

import gc
import weakref

from starlette.types import Message, Send

from proxy.dialects.chat import ChatCompletions
from proxy.routes.reply_sender import ReplySender


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
