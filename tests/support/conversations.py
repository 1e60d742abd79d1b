"""The conversations of calls, for tests without an event loop."""

from types import SimpleNamespace
from typing import Any

import orjson

from proxy.dialects.base import Call, template_arguments
from proxy.sessions.conversation import ConversationDigests, context_digest


def conversation_of(call: Call) -> ConversationDigests:
    context = context_digest(call.tools, template_arguments(call.body))
    conversation = ConversationDigests(context, num_bytes=len(orjson.dumps(call.messages)) - 1)
    conversation.extend(call.messages)
    return conversation


def new_chain() -> Any:
    """Return what an engine needs of the place of a call that extends nothing."""
    return SimpleNamespace(prompt=None)
