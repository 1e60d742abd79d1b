"""The messages of a call with their digests; those of an earlier call that begins with the same messages are reused.

An agent repeats its whole conversation with every call. The messages of every dialect have one canonical text: the JSON
array that the engine gets. An earlier call is recognised by the length of its text and a hash of that many bytes, so no
message is kept, and a call digests only the messages that are new to it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import operator
import time
from collections.abc import Sequence

import cachetools
import orjson
from blake3 import blake3

from proxy.continuation.digests import NO_FIELDS, History, context_digest, tool_call_ids
from proxy.dialects.base import Call, template_arguments
from proxy.dialects.chat import with_readable_arguments
from turnwise.types import Json

DIGEST_BYTES = 16
PREFIX_BYTES = 1_200
"""Memory of a prefix without messages, roughly."""
MESSAGE_BYTES = 210
"""Memory of the digests and the kind of one message, roughly."""
TAIL_BYTES = 48
"""Bytes at the end of a prefix that are compared before the text is hashed."""
MAX_COMPARED = 256
"""Prefixes of one owner, the newest ones, that a text is compared with."""
MAX_HASHED = 4
"""Prefixes with an equal tail that a text is hashed for."""

Owner = tuple[str, str, str]
"""A tenant, `session` or `key`, and the id of the session or, for calls that name none, of the API key."""


@dataclasses.dataclass(slots=True, eq=False)
class Prefix:
    """The messages of one call, and what was derived from them."""

    num_bytes: int
    """Length of their JSON array without the bracket that closes it."""
    digest: bytes
    """Of these bytes."""
    tail: bytes
    history: History
    kinds: list[int] = dataclasses.field(default_factory=list)
    """`Outliner.kind` of each message up to the turn that was extended last; shorter than the messages."""
    num_old_bytes: int = 0
    """Length of the prefix that it extends."""


def prefix_of(text: bytes, history: History) -> Prefix:
    """Return the prefix that a JSON array of messages is for later ones."""
    num_bytes = len(text) - 1
    return Prefix(num_bytes, _digest(text, num_bytes), text[max(0, num_bytes - TAIL_BYTES) : num_bytes], history)


def _digest(text: bytes, num_bytes: int) -> bytes:
    return blake3(memoryview(text)[:num_bytes]).digest(DIGEST_BYTES)


class Prefixes(cachetools.LRUCache[Prefix, tuple[Owner, int]]):
    """The last prefix of each conversation, up to an amount of memory; the least recently used ones are dropped."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, operator.itemgetter(1))
        self._by_owner: dict[Owner, dict[Prefix, None]] = {}

    def find(self, owner: Owner, text: bytes) -> Prefix | None:
        """Return the owner's longest prefix that a JSON array of messages begins with."""
        alike = [
            prefix
            for prefix in itertools.islice(reversed(self._by_owner.get(owner, {})), MAX_COMPARED)
            if text.endswith(prefix.tail, 0, prefix.num_bytes) and text.startswith((b",", b"]"), prefix.num_bytes)
        ]
        alike.sort(key=operator.attrgetter("num_bytes"), reverse=True)
        return next((each for each in alike[:MAX_HASHED] if each.digest == _digest(text, each.num_bytes)), None)

    def keep(self, owner: Owner, prefix: Prefix, replaced: Prefix | None) -> None:
        """Add a prefix, in the place of the one that it extends; drop others above the limit."""
        if replaced is not None:
            self.pop(replaced, None)
        self.pop(prefix, None)
        num_bytes = PREFIX_BYTES + len(prefix.history.full) * MESSAGE_BYTES
        if num_bytes <= self.maxsize:
            self[prefix] = owner, num_bytes
            self._by_owner.setdefault(owner, {})[prefix] = None

    def __delitem__(self, prefix: Prefix) -> None:
        """Drop a prefix."""
        owner, _ = self[prefix]
        super().__delitem__(prefix)
        del self._by_owner[owner][prefix]
        if not self._by_owner[owner]:
            del self._by_owner[owner]


HELD_SECONDS = 0.002
"""How long messages are encoded or digested before other calls run."""
SLICE_MESSAGES = 64
"""Messages that are encoded or digested between two looks at the clock."""


@dataclasses.dataclass(slots=True)
class Conversation:
    """The messages of one call."""

    messages: Sequence[Json]
    history: History
    """Digests of every prefix of the messages."""
    prefix: Prefix
    """All messages, for a later call that begins with them."""

    @property
    def num_replied(self) -> int:
        """Number of messages up to and including the last assistant message; 0 without one."""
        replies = self.history.replies
        return replies[-1] + 1 if replies else 0

    def call_ids(self) -> frozenset[str]:
        """Return the ids of all tool calls in the conversation: unique to a run, if the client sends them unchanged."""
        return frozenset().union(*(tool_call_ids(message) for message in self.messages if "tool_calls" in message))

    def after_replies(self, digests: list[bytes]) -> list[bytes]:
        """Return the digests of the history after each assistant message, the longest prefix first."""
        return [digests[end] for end in reversed(self.history.replies)]


@dataclasses.dataclass(slots=True)
class _Pauses:
    """Lets the event loop run between the steps of a long calculation."""

    since: float = dataclasses.field(default_factory=time.perf_counter)

    async def pause(self) -> None:
        """Let other calls run, if this one has run for long."""
        if time.perf_counter() - self.since > HELD_SECONDS:
            await asyncio.sleep(0)
            self.since = time.perf_counter()


async def read_conversation(
    call: Call, fields: frozenset[str] = NO_FIELDS, prefixes: Prefixes | None = None, owner: Owner | None = None
) -> Conversation:
    """Encode the messages of a call for the engine, digest those that no earlier call of the owner had, and keep them.

    Args:
        call: the call; its `messages_json` is set.
        fields: what the template prints beside the text.
        prefixes: the messages of earlier calls.
        owner: whose calls these are; None if nothing is used again.
    """
    pauses = _Pauses()
    await pauses.pause()
    call.messages_json = await _encode(call.messages, pauses)
    earlier = None if prefixes is None or owner is None else prefixes.find(owner, call.messages_json)
    context = context_digest(call.tools, template_arguments(call.body))
    is_usable = earlier is not None and (earlier.history.context, earlier.history.fields) == (context, fields)
    history = earlier.history.copy() if earlier is not None and is_usable else History(context, fields)
    for start in range(len(history.full), len(call.messages), SLICE_MESSAGES):
        history.extend(call.messages[start : start + SLICE_MESSAGES])
        await pauses.pause()
    prefix = prefix_of(call.messages_json, history)
    if earlier is not None:
        prefix.kinds, prefix.num_old_bytes = earlier.kinds, earlier.num_bytes
    if prefixes is not None and owner is not None:
        prefixes.keep(owner, prefix, earlier)
    return Conversation(call.messages, history, prefix)


async def _encode(messages: Sequence[Json], pauses: _Pauses) -> bytes:
    """Return the JSON array of messages as an engine accepts them."""
    pieces = []
    for start in range(0, len(messages), SLICE_MESSAGES):
        pieces.append(orjson.dumps(with_readable_arguments(messages[start : start + SLICE_MESSAGES]))[1:-1])
        await pauses.pause()
    return b"[%b]" % b",".join(pieces)
