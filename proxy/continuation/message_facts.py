"""What the process that decodes long requests finds out about their messages."""

from __future__ import annotations

from proxy.continuation.digests import has_media, message_digest
from proxy.dialects.chat import with_readable_arguments
from proxy.dialects.known_requests import MessageFacts
from proxy.dialects.object_sizes import all_json_bytes
from turnwise.types import Json


def read_messages(messages: list[Json], fields: frozenset[str]) -> MessageFacts:
    """Return the facts; `fields` are what the template prints beside the text."""
    is_readable = with_readable_arguments(messages) is messages
    return MessageFacts(
        [message_digest(message, fields) for message in messages],
        0 if has_media(messages) else len(messages),
        len(messages) if is_readable else 0,
        all_json_bytes(messages),
    )
