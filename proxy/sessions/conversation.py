"""Which differences of a repeated history do not count: digests of messages over what the chat template reads.

A request extends a turn when the digest of its first messages equals the digest of the turn's messages and reply. A
digest covers role, text and tool calls with their arguments as values, but no call whose arguments were not sampled to
the end: some formats cannot carry it. It covers names and the ids of tool calls only where the served template prints
them. It ignores all other fields, such as `provider_specific_fields`, `cache_control`
or thinking: no template reads them, and clients add, change and drop them.

An agent repeats its whole conversation with every call. The messages of every dialect have one canonical text: the JSON
array that the engine gets. An earlier call is recognised by the length of its text and a hash of that many bytes, so no
message is kept, and a call digests only the messages that are new to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import operator
import time
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Any, TypeAlias

import cachetools
import orjson
from blake3 import blake3

from proxy.auth import Principal
from proxy.dialects.base import SYSTEM_ROLES, Call, template_arguments
from proxy.dialects.chat import UNREAD_CALL, is_readable, with_readable_arguments
from turnwise.json_text import dumps, json_object, loads, unify_numbers
from turnwise.tokenizer import text_of_part
from turnwise.types import Json

DIGEST_BYTES = 8
"""Digests of conversations are compared within one session, or one API key's sessions, so 64 bits are plenty."""
LONG_DIGEST_BYTES = 16
"""Length of the digest of one message, and of a text that begins another."""
CONVERSATION_BYTES = 1_200
"""Memory of a conversation without messages, roughly."""
MESSAGE_BYTES = 210
"""Memory of the digests and the kind of one message, roughly."""
TAIL_BYTES = 48
"""Bytes at the end of a text that are compared before the text is hashed."""
LONG_BYTES = 64 * 2**10
"""Messages of a call that leaves much freed memory."""
MAX_COMPARED = 256
"""Conversations of one owner that are kept, the newest ones."""
MAX_HASHED = 4
"""Conversations with an equal tail that a text is hashed for."""
HELD_SECONDS = 0.002
"""How long messages are encoded or digested before other calls run."""
SLICE_MESSAGES = 64
"""Messages that are encoded or digested between two looks at the clock."""
NAMED_TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
"""A tuple, not a set, because a client may send an unhashable value as a type."""
TEXT_PARTS = (*NAMED_TEXT_PARTS, None)
"""Types of the parts that vLLM reads as text (vllm/renderers/chat_utils.py); it also takes texts as parts."""
NAME, CALL_IDS = "name", "call_ids"
"""What a template may print besides role, content and tool calls: the sender's name, the ids of tool calls."""
CALL_TEXT = "call_text"
"""Not printed by templates: text beside tool calls is left out where the calls' ids are those that were sampled."""
NO_FIELDS: frozenset[str] = frozenset()
Owner: TypeAlias = tuple[str, str, str, bytes]
"""A tenant, `session` or `key`, the id of the session or, for calls that name none, of the API key, and then the digest
of the first message that is no system message: one key may have thousands of conversations."""


@dataclasses.dataclass(slots=True, eq=False)
class ConversationDigests:
    """The digests of a list of messages: entry i of three lists covers the first i + 1 messages."""

    context: bytes
    """The digest of tools and template arguments."""
    fields: frozenset[str] = NO_FIELDS
    """What the template prints of `NAME` and `CALL_IDS`."""
    full: list[bytes] = dataclasses.field(default_factory=list)
    """With tools and template arguments."""
    messages: list[bytes] = dataclasses.field(default_factory=list)
    """Without tools and template arguments."""
    dialogue: list[bytes] = dataclasses.field(default_factory=list)
    """Without system messages as well."""
    replies: list[int] = dataclasses.field(default_factory=list)
    num_replied: int = 0
    """Number of messages up to the last reply."""
    num_bytes: int = 0
    """Length of the messages' JSON array without the bracket that closes it."""
    digest: bytes = b""
    tail: bytes = b""
    num_old_bytes: int = 0
    """`num_bytes` of the earlier call's conversation that it extends; 0 without one."""
    kinds: list[int] = dataclasses.field(default_factory=list)
    """What the template distinguishes each message by, up to the turn that was extended last; may be shorter than the
    messages."""

    def extend(self, messages: Iterable[Json]) -> None:
        """Add the next messages."""
        for message in messages:
            if message.get("role") == "assistant":
                self.replies.append(len(self.full))
                self.num_replied = len(self.full) + 1
            full, plain, dialogue = self.extended(message)
            self.full.append(full)
            self.messages.append(plain)
            self.dialogue.append(dialogue)

    def extended(self, message: Json) -> tuple[bytes, bytes, bytes]:
        """Return the last entries of `full`, `messages` and `dialogue` after one more message."""
        digest = message_digest(message, self.fields)
        messages = chained(self.messages[-1] if self.messages else b"", digest)
        dialogue = self.dialogue[-1] if self.dialogue else b""
        return (
            chained(self.full[-1] if self.full else self.context, digest) if self.context else messages,
            messages,
            dialogue if message.get("role") in SYSTEM_ROLES else chained(dialogue, digest),
        )


class Conversations(cachetools.FIFOCache[Owner, tuple[ConversationDigests, ...]]):
    """The conversations of recent calls, up to an amount of memory; of the owner that called least recently first."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            max_bytes, lambda kept: sum(CONVERSATION_BYTES + len(each.full) * MESSAGE_BYTES for each in kept)
        )
        self.num_bytes_read = 0
        """Bytes of the messages of long calls, which leave much freed memory."""

    async def read(self, call: Call, principal: Principal, fields: frozenset[str]) -> ConversationDigests:
        """Encode a call's messages for the engine, digest those that no earlier call of the owner had, and keep both.

        Args:
            call: the call; its `messages_json` is set.
            principal: its caller.
            fields: what the template prints beside the text.
        """
        if call.session_id is not None:
            owner = principal.tenant, "session", call.session_id, b""
        else:
            asked = next((each for each in call.messages if each.get("role") not in SYSTEM_ROLES), {})
            owner = principal.tenant, "key", principal.key_id, message_digest(asked)
        pieces, since = [], time.perf_counter()
        for start in range(0, len(call.messages), SLICE_MESSAGES):
            some = call.messages[start : start + SLICE_MESSAGES]
            pieces.append(dumps([with_readable_arguments(each) if "tool_calls" in each else each for each in some]))
            if time.perf_counter() - since > HELD_SECONDS:
                since = await _let_others_run()
        text = pieces[0] if len(pieces) == 1 else b"[%b]" % b",".join(piece[1:-1] for piece in pieces)
        call.messages_json = text
        self.num_bytes_read += len(text) if len(text) >= LONG_BYTES else 0
        earlier, hashed = self.find(owner, text)
        conversation = ConversationDigests(context_digest(call.tools, template_arguments(call.body)), fields)
        if earlier is not None:
            conversation.num_old_bytes, conversation.kinds = earlier.num_bytes, earlier.kinds
            if (earlier.context, earlier.fields) == (conversation.context, fields):
                conversation.full, conversation.messages = earlier.full[:], earlier.messages[:]
                conversation.dialogue, conversation.replies = earlier.dialogue[:], earlier.replies[:]
                conversation.num_replied = earlier.num_replied
        for start in range(len(conversation.full), len(call.messages), SLICE_MESSAGES):
            conversation.extend(call.messages[start : start + SLICE_MESSAGES])
            if time.perf_counter() - since > HELD_SECONDS:
                since = await _let_others_run()
        conversation.num_bytes = end = len(text) - 1
        new_text = memoryview(text)[conversation.num_old_bytes : end]
        conversation.digest = hashed.update(new_text).digest(LONG_DIGEST_BYTES)
        conversation.tail = text[max(0, end - TAIL_BYTES) : end]
        self.keep(owner, conversation, earlier)
        return conversation

    def find(self, owner: Owner, text: bytes) -> tuple[ConversationDigests | None, blake3]:
        """Return the owner's longest conversation that a JSON array of messages begins with, and the hash of it."""
        alike = [
            each
            for each in self.get(owner, ())
            if text.endswith(each.tail, 0, each.num_bytes) and text.startswith((b",", b"]"), each.num_bytes)
        ]
        alike.sort(key=operator.attrgetter("num_bytes"), reverse=True)
        for each in alike[:MAX_HASHED]:
            hashed = blake3(memoryview(text)[: each.num_bytes])
            if hashed.digest(LONG_DIGEST_BYTES) == each.digest:
                return each, hashed
        return None, blake3()

    def keep(self, owner: Owner, conversation: ConversationDigests, replaced: ConversationDigests | None) -> None:
        """Add a conversation, in the place of the one that it extends."""
        others = [each for each in self.get(owner, ()) if each is not replaced]
        for kept in ((*others, conversation)[-MAX_COMPARED:], (conversation,)):
            with contextlib.suppress(ValueError):  # these alone are too long
                self[owner] = kept
                return


async def _let_others_run() -> float:
    """Let other calls run; return since when this one runs again."""
    await asyncio.sleep(0)
    return time.perf_counter()


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
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        calls = [call for call in calls if is_readable(call)]
    if calls:
        canonical["t"] = [_canonical_call(call, fields) for call in calls] if isinstance(calls, list) else calls
    if message.get("role") == "assistant" and isinstance(content, str):
        said = content.partition(UNREAD_CALL)[0].strip()
        canonical["c"] = "" if CALL_TEXT in fields and calls and _have_ids(calls) else said
    if NAME in fields and message.get("name"):
        canonical["n"] = message["name"]
    if CALL_IDS in fields and message.get("tool_call_id"):
        canonical["i"] = message["tool_call_id"]
    return blake2b(dumps(canonical, option=orjson.OPT_SORT_KEYS), digest_size=LONG_DIGEST_BYTES).digest()


def canonical_content(content: Any) -> Any:
    """Return content that is only text as one string; return other content without `cache_control`."""
    if content is None:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict | str) for part in content):
        return content
    if all(isinstance(part, str) or part.get("type") in TEXT_PARTS for part in content):
        return "\n".join(map(text_of_part, content))
    if any(isinstance(part, str) for part in content):
        return content
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
    """Return tool arguments as a JSON object, so that spaces, key order and the spelling of numbers do not count."""
    if isinstance(arguments, str):
        return json_object(arguments) or {}
    if isinstance(arguments, dict):
        arguments = loads(dumps(arguments))
        unify_numbers(arguments)
    return {} if arguments is None else arguments


def tool_call_ids(message: Json) -> frozenset[str]:
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return frozenset()
    return frozenset(call_id for call in calls if isinstance(call, dict) and isinstance(call_id := call.get("id"), str))


def has_media(messages: Sequence[Json]) -> bool:
    """Return whether any message may have content that is not text; vLLM also takes it from a part without a type."""
    return any(
        isinstance(part, dict) and (part.get("type") not in NAMED_TEXT_PARTS or "uuid" in part)
        for message in messages
        if isinstance(content := message.get("content"), list)
        for part in content
    )
