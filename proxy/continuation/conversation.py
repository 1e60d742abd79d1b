"""The conversation that a call sends, with its digests: computed once, then passed to every step of the call."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from proxy.continuation.digests import NO_FIELDS, History, context_digest, digest_history, has_media
from proxy.dialects.base import Call
from proxy.dialects.known_requests import KnownRequest
from turnwise.types import Json

SLICE_MESSAGES = 2_000
"""Known messages whose digests are added in one step of the event loop; each takes 1 µs."""


@dataclasses.dataclass(slots=True)
class Conversation:
    """The messages of one call."""

    messages: Sequence[Json]
    history: History
    """Digests of every prefix of the messages."""
    known: KnownRequest | None = None
    """What was derived from the messages that an earlier request had too."""

    @property
    def num_replied(self) -> int:
        """Number of messages up to and including the last assistant message; 0 without one."""
        replies = self.history.replies
        return replies[-1] + 1 if replies else 0

    def call_ids(self) -> frozenset[str]:
        """Return the ids of all tool calls in the conversation: unique to a run, if the client sends them unchanged."""
        num_read, earlier = (0, frozenset[str]()) if self.known is None else self.known.call_ids
        found = earlier.union(*map(tool_call_ids, self.messages[num_read:]))
        if self.known is not None:
            self.known.call_ids = len(self.messages), found
        return found

    def replied_digests(self) -> list[bytes]:
        """Return the full digest after each assistant message, the longest prefix first."""
        return self._after_replies(self.history.full)

    def replied_dialogue_digests(self) -> list[bytes]:
        """Return the same digests without tools and system messages."""
        return self._after_replies(self.history.dialogue)

    def _after_replies(self, digests: list[bytes]) -> list[bytes]:
        return [digests[end] for end in reversed(self.history.replies)]


def tool_call_ids(message: Json) -> frozenset[str]:
    """Return the ids of a message's tool calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return frozenset()
    return frozenset(call_id for call in calls if isinstance(call, dict) and isinstance(call_id := call.get("id"), str))


def read_conversation(call: Call, fields: frozenset[str] = NO_FIELDS, earlier: History | None = None) -> Conversation:
    """Compute the digests of a call's conversation.

    Args:
        call: the call.
        fields: what the template prints beside the text.
        earlier: the digests of the first messages, for a call without known messages.
    """
    context = context_digest(call.tools, call.template_arguments)
    known = call.known_messages
    digests: list[bytes] = []
    if known is not None:
        earlier = known.history
        digests = known.digests if known.digest_fields == fields else []
    history = digest_history(call.messages, context, fields, earlier, digests)
    if known is not None:
        known.history, known.digests = history, []
    return Conversation(call.messages, history, known)


async def read_in_slices(call: Call, fields: frozenset[str] = NO_FIELDS) -> Conversation:
    """Do what `read_conversation` does; let the event loop run between slices of many known messages."""
    known = call.known_messages
    if known is not None and known.digest_fields == fields:
        context = context_digest(call.tools, call.template_arguments)
        for end in range(SLICE_MESSAGES, len(known.digests), SLICE_MESSAGES):
            known.history = digest_history(call.messages[:end], context, fields, known.history, known.digests)
            await asyncio.sleep(0)
    return read_conversation(call, fields)


def call_has_media(call: Call) -> bool:
    """Return whether any message of a call has content that is not text."""
    known = call.known_messages
    if known is None:
        return has_media(call.messages)
    found = has_media(call.messages[known.num_text :])
    if not found:
        known.num_text = len(call.messages)
    return found
