"""The conversations of calls, for tests without an event loop."""

from __future__ import annotations

import orjson

from proxy.continuation.conversation import Conversation, prefix_of
from proxy.continuation.digests import NO_FIELDS, History, context_digest, digest_history
from proxy.dialects.base import Call, template_arguments


def history_of(call: Call, fields: frozenset[str] = NO_FIELDS) -> History:
    """Return the digests of a call's messages."""
    return digest_history(call.messages, context_digest(call.tools, template_arguments(call.body)), fields)


def conversation_of(call: Call) -> Conversation:
    """Return a call's conversation."""
    history = history_of(call)
    return Conversation(call.messages, history, prefix_of(orjson.dumps(call.messages), history))
