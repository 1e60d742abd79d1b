"""Digests of conversations: one after every message, independent of how a client writes the messages.

A request extends a turn when the digest of its first messages equals the digest of the turn's messages and reply. The
digest ignores what clients are known to change when they send a reply back: tool-call ids, spaces and key order in
tool arguments, `null` instead of an absent field, text parts instead of plain text, and thinking, which most clients
drop. It ignores nothing else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import orjson

from turnwise.types import Json

DIGEST_BYTES = 8
"""Digests are compared within one session, or one API key's sessions, so 64 bits are plenty."""
MESSAGE_BYTES = 16
"""Length of the digest of one message, which is hashed into the digests of all conversations that contain it."""
SYSTEM_ROLES = ("system", "developer")
"""A tuple, not a set, because a client may send an unhashable value as a role or a type."""
TEXT_PARTS = ("text", "refusal", None)
"""Types of content parts that are text."""
HANDLED_FIELDS = frozenset({"content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content", "role"})
"""Message fields that `message_digest` reads by name or ignores."""


@dataclasses.dataclass(frozen=True, slots=True)
class History:
    """Digests of a list of messages: entry i covers the first i + 1 messages."""

    full: list[bytes]
    """With tools and template arguments."""
    messages: list[bytes]
    """Without tools and template arguments."""
    dialogue: list[bytes]
    """Without system messages as well."""
    states: tuple[Any, Any, Any]
    """The three running hashes after the last message."""

    def extended(self, message: Json) -> tuple[bytes, bytes, bytes]:
        """Return the three digests after one more message, the reply."""
        digest = message_digest(message)
        states = [state.copy() for state in self.states]
        for state in states:
            state.update(digest)
        return states[0].digest(), states[1].digest(), states[2].digest()


def digest_history(messages: Sequence[Json], context: bytes) -> History:
    """Digest every prefix of `messages`; `context` is the digest of tools and template arguments."""
    full, plain, dialogue = blake2b(context, digest_size=DIGEST_BYTES), _empty(), _empty()
    history = History([], [], [], (full, plain, dialogue))
    for message in messages:
        digest = message_digest(message)
        full.update(digest)
        plain.update(digest)
        if message.get("role") not in SYSTEM_ROLES:
            dialogue.update(digest)
        history.full.append(full.digest())
        history.messages.append(plain.digest())
        history.dialogue.append(dialogue.digest())
    return history


def _empty() -> Any:
    return blake2b(digest_size=DIGEST_BYTES)


def context_digest(tools: Any, template: Json) -> bytes:
    """Return the digest of what a chat template renders besides messages: tool schemas and template arguments."""
    if not tools and not template:
        return b""
    return blake2b(orjson.dumps([tools, template], option=orjson.OPT_SORT_KEYS), digest_size=DIGEST_BYTES).digest()


def message_digest(message: Json) -> bytes:
    """Return the digest of one message."""
    canonical: Json = {"r": message.get("role"), "c": canonical_content(message.get("content"))}
    if calls := message.get("tool_calls"):
        canonical["t"] = [_canonical_call(call) for call in calls] if isinstance(calls, list) else calls
    if others := {
        key: value for key, value in message.items() if key not in HANDLED_FIELDS and value not in (None, [], "")
    }:
        canonical["o"] = others
    return blake2b(orjson.dumps(canonical, option=orjson.OPT_SORT_KEYS), digest_size=MESSAGE_BYTES).digest()


def canonical_content(content: Any) -> Any:
    """Return content that is only text as one string; return other content unchanged."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "\n".join(str(part.get("text", "")) for part in content)
    return content


def _canonical_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    return [function.get("name"), canonical_arguments(function.get("arguments"))]


@functools.lru_cache(maxsize=4096)
def _parsed_arguments(text: str) -> Any:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text


def canonical_arguments(arguments: Any) -> Any:
    """Return tool arguments as a JSON value, so that spaces and key order do not count; invalid JSON stays text."""
    if isinstance(arguments, str):
        return _parsed_arguments(arguments) if arguments.strip() else {}
    return {} if arguments is None else arguments


def has_media(messages: Sequence[Json]) -> bool:
    """Return whether any message has content that is not text: only vLLM can render such prompts."""
    return any(
        isinstance(part, dict) and part.get("type") not in TEXT_PARTS
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )
