"""Digests of conversations: one after every message, over what the chat template reads and nothing else.

A request extends a turn when the digest of its first messages equals the digest of the turn's messages and reply. A
digest covers role, text and tool calls with their arguments as values. It covers names and the ids of tool calls only
where the served template prints them. It ignores all other fields, such as `provider_specific_fields`, `cache_control`
or thinking: no template reads them, and clients add, change and drop them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from turnwise.json_text import dumps, json_object, loads, unify_numbers
from turnwise.types import Json

DIGEST_BYTES = 8
"""Digests are compared within one session, or one API key's sessions, so 64 bits are plenty."""
MESSAGE_BYTES = 16
"""Length of the digest of one message, which is hashed into the digests of all conversations that contain it."""
MIN_TASK = 8
"""Characters of an argument that may be the task of a sub-agent."""
MIN_REPLY = 32
"""Characters of a reply that is recognised by its text alone."""
SYSTEM_ROLES = ("system", "developer")
"""A tuple, not a set, because a client may send an unhashable value as a role or a type."""
TEXT_PARTS = ("text", "refusal", None)
"""Types of content parts that are text."""
NAME, CALL_IDS = "name", "call_ids"
"""What a template may print besides role, content and tool calls: the sender's name, the ids of tool calls."""
CALL_TEXT = "call_text"
"""Not printed by templates: text beside tool calls is left out where the calls' ids are those that were sampled."""
NO_FIELDS: frozenset[str] = frozenset()


class Digests(NamedTuple):
    """The digests of the first messages of a conversation."""

    full: bytes
    """With tools and template arguments."""
    messages: bytes
    """Without tools and template arguments."""
    dialogue: bytes
    """Without system messages as well."""


@dataclasses.dataclass(slots=True)
class History:
    """Digests of a list of messages: entry i covers the first i + 1 messages, as the fields of `Digests`."""

    context: bytes
    """The digest of tools and template arguments."""
    fields: frozenset[str] = NO_FIELDS
    """What the template prints of `NAME` and `CALL_IDS`."""
    full: list[bytes] = dataclasses.field(default_factory=list)
    messages: list[bytes] = dataclasses.field(default_factory=list)
    dialogue: list[bytes] = dataclasses.field(default_factory=list)
    replies: list[int] = dataclasses.field(default_factory=list)
    """Positions of the assistant messages."""

    def copy(self) -> History:
        """Return a copy; extending it does not change this one."""
        lists = self.full[:], self.messages[:], self.dialogue[:], self.replies[:]
        return History(self.context, self.fields, *lists)

    def extend(self, messages: Iterable[Json]) -> None:
        """Add the next messages."""
        for message in messages:
            if message.get("role") == "assistant":
                self.replies.append(len(self.full))
            after = self.extended(message)
            self.full.append(after.full)
            self.messages.append(after.messages)
            self.dialogue.append(after.dialogue)

    def extended(self, message: Json) -> Digests:
        """Return the digests after one more message."""
        digest = message_digest(message, self.fields)
        messages = chained(self.messages[-1] if self.messages else b"", digest)
        dialogue = self.dialogue[-1] if self.dialogue else b""
        return Digests(
            chained(self.full[-1] if self.full else self.context, digest) if self.context else messages,
            messages,
            dialogue if message.get("role") in SYSTEM_ROLES else chained(dialogue, digest),
        )


def chained(before: bytes, digest: bytes) -> bytes:
    return blake2b(before + digest, digest_size=DIGEST_BYTES).digest()


def context_digest(tools: Any, template: Json) -> bytes:
    """Return the digest of what a chat template renders besides messages: tool schemas and template arguments."""
    if not tools and not template:
        return b""
    return blake2b(dumps([tools, template], option=orjson.OPT_SORT_KEYS), digest_size=DIGEST_BYTES).digest()


def message_digest(message: Json, fields: frozenset[str] = NO_FIELDS) -> bytes:
    """Return the digest of one message."""
    content = canonical_content(message.get("content"))
    canonical: Json = {"r": message.get("role"), "c": content}
    if calls := message.get("tool_calls"):
        canonical["t"] = [_canonical_call(call, fields) for call in calls] if isinstance(calls, list) else calls
    if message.get("role") == "assistant" and isinstance(content, str):
        canonical["c"] = "" if CALL_TEXT in fields and calls and _have_ids(calls) else content.strip()
    if NAME in fields and message.get("name"):
        canonical["n"] = message["name"]
    if CALL_IDS in fields and message.get("tool_call_id"):
        canonical["i"] = message["tool_call_id"]
    return blake2b(dumps(canonical, option=orjson.OPT_SORT_KEYS), digest_size=MESSAGE_BYTES).digest()


def canonical_content(content: Any) -> Any:
    """Return content that is only text as one string; return other content without `cache_control`."""
    if content is None:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        return content
    if all(part.get("type") in TEXT_PARTS for part in content):
        return "\n".join(str(part.get("text") or part.get("refusal") or "") for part in content)
    return [{field: value for field, value in part.items() if field != "cache_control"} for part in content]


def _canonical_call(call: Any, fields: frozenset[str]) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return call
    canonical = [function.get("name"), canonical_arguments(function.get("arguments"))]
    return canonical if fields.isdisjoint((CALL_IDS, CALL_TEXT)) else [*canonical, call.get("id")]


def _have_ids(calls: Any) -> bool:
    return isinstance(calls, list) and all(isinstance(call, dict) and call.get("id") for call in calls)


def canonical_arguments(arguments: Any) -> Any:
    """Return tool arguments as a JSON object, so that spaces, key order and the spelling of numbers do not count.

    Invalid JSON, and JSON that is not an object, is an empty object: so vLLM renders it, and so formats whose arguments
    are objects send it back.
    """
    if isinstance(arguments, str):
        return json_object(arguments) or {}
    if isinstance(arguments, dict):
        arguments = loads(dumps(arguments))
        unify_numbers(arguments)
    return {} if arguments is None else arguments


def tool_call_ids(message: Json) -> frozenset[str]:
    """Return the ids of a message's tool calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return frozenset()
    return frozenset(call_id for call in calls if isinstance(call, dict) and isinstance(call_id := call.get("id"), str))


def text_digest(text: str) -> bytes:
    return blake2b(text.strip().encode(errors="replace"), digest_size=DIGEST_BYTES).digest()


def reply_digest(message: Json) -> bytes:
    text = canonical_content(message.get("content")) if message.get("role") == "assistant" else None
    return text_digest(text) if isinstance(text, str) and len(text.strip()) >= MIN_REPLY else b""


def argument_digests(message: Json) -> frozenset[bytes]:
    """Return the digests of the texts among the arguments of a message's tool calls."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return frozenset()
    functions = [call.get("function") for call in calls if isinstance(call, dict)]
    given = [canonical_arguments(each.get("arguments")) for each in functions if isinstance(each, dict)]
    texts = (value for each in given if isinstance(each, dict) for value in each.values() if isinstance(value, str))
    return frozenset(text_digest(text) for text in texts if len(text) >= MIN_TASK)


def has_media(messages: Sequence[Json]) -> bool:
    """Return whether any message has content that is not text: only vLLM can render such prompts."""
    return any(
        isinstance(part, dict) and part.get("type") not in TEXT_PARTS
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )
