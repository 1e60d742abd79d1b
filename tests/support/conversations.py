"""The conversations of calls, for tests without an event loop."""

import orjson

from proxy.dialects.base import Call, template_arguments
from proxy.sessions.conversation import NO_FIELDS, ConversationDigests, context_digest
from turnwise.types import Json


def digest_history(messages: list[Json], context: bytes, fields: frozenset[str] = NO_FIELDS) -> ConversationDigests:
    conversation = ConversationDigests(context, fields, num_bytes=len(orjson.dumps(messages)) - 1)
    conversation.extend(messages)
    return conversation


def conversation_of(call: Call) -> ConversationDigests:
    return digest_history(call.messages, context_digest(call.tools, template_arguments(call.body)))
