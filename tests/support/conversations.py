"""The conversations of calls, for tests without an event loop."""

from __future__ import annotations

import orjson

from proxy.dialects.base import Call, template_arguments
from proxy.sessions.conversation import Conversation, prefix_of
from proxy.sessions.digests import NO_FIELDS, History, context_digest
from turnwise.types import Json


def digest_history(messages: list[Json], context: bytes, fields: frozenset[str] = NO_FIELDS) -> History:
    """Return the digests of messages."""
    history = History(context, fields)
    history.extend(messages)
    return history


def history_of(call: Call, fields: frozenset[str] = NO_FIELDS) -> History:
    """Return the digests of a call's messages."""
    return digest_history(call.messages, context_digest(call.tools, template_arguments(call.body)), fields)


def conversation_of(call: Call) -> Conversation:
    """Return a call's conversation."""
    history = history_of(call)
    return Conversation(call.messages, history, prefix_of(orjson.dumps(call.messages), history))
