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

from blake3 import blake3

from proxy.dialects.base import Call, template_arguments
from proxy.dialects.chat import with_readable_arguments
from proxy.sessions.digests import History, context_digest, tool_call_ids
from turnwise.json_text import dumps
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

Owner = tuple[str, str, str, bytes]
"""A tenant, `session` or `key`, the id of the session or, for calls that name none, of the API key, and then the digest
of the first message that is no system message: one key may have thousands of conversations."""


@dataclasses.dataclass(slots=True, eq=False)
class Prefix:
    """The messages of one call, and what was derived from them."""

    num_bytes: int
    """Length of their JSON array without the bracket that closes it."""
    digest: bytes
    """Of these bytes."""
    tail: bytes
    history: History
    num_old_bytes: int
    """Length of the prefix that it extends; 0 without one."""
    kinds: list[int]
    """`Outliner.kind` of each message up to the turn that was extended last; shorter than the messages."""
    memory: int
    """Bytes of memory that it takes, roughly."""


def prefix_of(text: bytes, history: History, earlier: Prefix | None = None, hashed: blake3 | None = None) -> Prefix:
    """Return the prefix that a JSON array of messages is for later ones.

    Args:
        text: the array.
        history: the digests of its messages.
        earlier: the prefix that it extends.
        hashed: the hash of the bytes of that one.
    """
    num_bytes, num_old_bytes = len(text) - 1, 0 if earlier is None else earlier.num_bytes
    hashed = (hashed or blake3()).update(memoryview(text)[num_old_bytes:num_bytes])
    return Prefix(
        num_bytes=num_bytes,
        digest=hashed.digest(DIGEST_BYTES),
        tail=text[max(0, num_bytes - TAIL_BYTES) : num_bytes],
        history=history,
        num_old_bytes=num_old_bytes,
        kinds=[] if earlier is None else earlier.kinds,
        memory=PREFIX_BYTES + len(history.full) * MESSAGE_BYTES,
    )


class Prefixes:
    """The last prefix of each conversation, up to an amount of memory; those that were kept first are dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self.num_bytes = 0
        """Memory of all prefixes, roughly."""
        self._owners: dict[Prefix, Owner] = {}
        self._by_owner: dict[Owner, dict[Prefix, None]] = {}

    def find(self, owner: Owner, text: bytes) -> tuple[Prefix | None, blake3]:
        """Return the owner's longest prefix that a JSON array of messages begins with, and the hash of these bytes."""
        alike = [
            prefix
            for prefix in itertools.islice(reversed(self._by_owner.get(owner, {})), MAX_COMPARED)
            if text.endswith(prefix.tail, 0, prefix.num_bytes) and text.startswith((b",", b"]"), prefix.num_bytes)
        ]
        alike.sort(key=operator.attrgetter("num_bytes"), reverse=True)
        for prefix in alike[:MAX_HASHED]:
            hashed = blake3(memoryview(text)[: prefix.num_bytes])
            if hashed.digest(DIGEST_BYTES) == prefix.digest:
                return prefix, hashed
        return None, blake3()

    def keep(self, owner: Owner, prefix: Prefix, replaced: Prefix | None) -> None:
        """Add a prefix, in the place of the one that it extends; drop others above the limit."""
        if replaced in self._owners:
            self._drop(replaced)
        if prefix.memory > self._max_bytes:
            return
        self._owners[prefix] = owner
        self._by_owner.setdefault(owner, {})[prefix] = None
        self.num_bytes += prefix.memory
        while self.num_bytes > self._max_bytes:
            self._drop(next(iter(self._owners)))

    def clear(self) -> None:
        """Drop all prefixes."""
        self.num_bytes, self._owners, self._by_owner = 0, {}, {}

    def _drop(self, prefix: Prefix) -> None:
        owner = self._owners.pop(prefix)
        self.num_bytes -= prefix.memory
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
        replies = self.history.replies
        return replies[-1] + 1 if replies else 0

    def call_ids(self) -> frozenset[str]:
        return frozenset().union(*(tool_call_ids(message) for message in self.messages if "tool_calls" in message))

    def after_replies(self, digests: list[bytes]) -> list[bytes]:
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


async def read_conversation(call: Call, fields: frozenset[str], prefixes: Prefixes, owner: Owner) -> Conversation:
    """Encode the messages of a call for the engine, digest those that no earlier call of the owner had, and keep them.

    Args:
        call: the call; its `messages_json` is set.
        fields: what the template prints beside the text.
        prefixes: the messages of earlier calls.
        owner: whose calls these are.
    """
    pauses = _Pauses()
    call.messages_json = await _encode(call.messages, pauses)
    earlier, hashed = prefixes.find(owner, call.messages_json)
    context = context_digest(call.tools, template_arguments(call.body))
    is_usable = earlier is not None and (earlier.history.context, earlier.history.fields) == (context, fields)
    history = earlier.history.copy() if earlier is not None and is_usable else History(context, fields)
    for start in range(len(history.full), len(call.messages), SLICE_MESSAGES):
        history.extend(call.messages[start : start + SLICE_MESSAGES])
        await pauses.pause()
    prefix = prefix_of(call.messages_json, history, earlier, hashed)
    prefixes.keep(owner, prefix, earlier)
    return Conversation(call.messages, history, prefix)


async def _encode(messages: Sequence[Json], pauses: _Pauses) -> bytes:
    """Return the JSON array of messages as an engine accepts them."""
    if len(messages) <= SLICE_MESSAGES:
        return dumps(with_readable_arguments(messages))
    pieces = []
    for start in range(0, len(messages), SLICE_MESSAGES):
        pieces.append(dumps(with_readable_arguments(messages[start : start + SLICE_MESSAGES]))[1:-1])
        await pauses.pause()
    return b"[%b]" % b",".join(pieces)
