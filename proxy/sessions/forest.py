"""A session's turns in memory as a forest: which turn a request extends, and by which reason its chain breaks.

A turn takes about a thousand bytes, so the turns are the largest part of what a proxy remembers of a long session.
Token ids are kept as the JSON text that goes to the engine, in pieces that the turns of a chain share. Encoding and
decoding a million ids takes 45 ms, copying their text 0.2 ms. So the text of a turn's ids is kept and extended by the
text of the next turn's new ids, and it is decoded only where a number is needed.
"""

from __future__ import annotations

import bisect
import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import orjson

from proxy.sessions.conversation import ConversationDigests, tool_call_ids
from turnwise.types import DEFAULT_POLICY, Json, Parts, TokenIds, Turn

PIECE_BYTES = 160
"""Memory of a piece of ids beside its text, roughly: the two objects."""
TURN_BYTES = 660
"""Memory of a turn without its id and texts: the object, its digests and times, and its index entries."""
FOREST_BYTES = 1_000


@dataclasses.dataclass(slots=True, eq=False)
class EncodedIds:
    """A list of token ids: the list `before`, and one more piece."""

    before: EncodedIds | None
    """The ids before this piece, shared by all lists that extend them."""
    piece: bytes
    """Decimal numbers, separated by commas."""
    num_ids: int
    num_bytes: int
    """Memory of all pieces."""
    last_id: int

    def json(self) -> bytes:
        """Return the JSON array of all ids."""
        pieces, ids = [b"]"], self
        while ids.before is not None:
            pieces += (ids.piece, b",")
            ids = ids.before
        pieces += (ids.piece, b"[")
        pieces.reverse()
        return b"".join(pieces)

    def decoded(self) -> TokenIds:
        return np.array(orjson.loads(self.json()), np.int32)


def encode_ids(ids: TokenIds, before: EncodedIds | None = None) -> EncodedIds:
    return encoded(ids_as_text(ids), len(ids) + (0 if before is None else before.num_ids), before)


def encoded(piece: bytes, num_ids: int, before: EncodedIds | None = None) -> EncodedIds:
    """Return the list of the ids of a text, at least one, after the ids `before`: `num_ids` in all."""
    num_bytes = len(piece) + PIECE_BYTES + (0 if before is None else before.num_bytes)
    return EncodedIds(before, piece, num_ids, num_bytes, int(piece[piece.rfind(b",") + 1 :]))


def ids_as_text(ids: TokenIds) -> bytes:
    return orjson.dumps(np.ascontiguousarray(ids, np.int32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def count_ids(text: bytes) -> int:
    return text.count(b",") + 1 if text else 0


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class KnownTurn:
    """The part of a stored turn that is needed to extend it."""

    turn_id: str
    policy_id: int = DEFAULT_POLICY
    parent_turn_id: str | None
    chain_id: str
    num_messages: int
    """Number of messages in its prompt, plus 1 for its reply."""
    history_digest: bytes
    messages_digest: bytes
    dialogue_digest: bytes
    prompt_digest: bytes = b""
    """Digest of the prompt's messages alone."""
    reasoning: str = ""
    call_ids: tuple[str, ...] = ()
    is_aborted: bool = False
    is_truncated: bool = False
    """Whether the engine may have left out the begin of its prompt, as its call asked."""
    about: Any = None
    """What a feature keeps of it, with `num_bytes`; None without one."""
    has_child: bool = False
    """Whether a turn whose reply was not cut off extends it, or a call without its tokens went on from it."""
    parts: Parts | None = None
    """The parts of what its prompt adds to its parent's tokens; None without one."""
    tokens: EncodedIds | None = None
    """Prompt and sampled ids; None when they must be read from the store."""


Describe = Callable[[Turn, KnownTurn | None], Any]
"""Returns what a feature keeps of a stored turn, whose parent it gets, as `KnownTurn.about`."""


def repeated_calls(messages: Sequence[Json]) -> frozenset[str]:
    return frozenset().union(*(tool_call_ids(message) for message in messages if "tool_calls" in message))


TurnIndex = dict[bytes, tuple[KnownTurn, ...]]
"""Turns by a digest, in the order in which they were added."""


@dataclasses.dataclass(slots=True)
class TurnForest:
    """The turns of one policy in a session, indexed by id and by conversation digest."""

    by_id: dict[str, KnownTurn] = dataclasses.field(default_factory=dict)
    by_history: TurnIndex = dataclasses.field(default_factory=dict)
    """Several turns have the same history where parallel agents got the same reply."""
    by_dialogue: TurnIndex = dataclasses.field(default_factory=dict)
    """The same without system messages, tools and template arguments."""
    by_prompt: TurnIndex = dataclasses.field(default_factory=dict)
    num_bytes: int = FOREST_BYTES
    """Memory of all turns, roughly, without their tokens."""

    def add(self, turn: KnownTurn) -> KnownTurn:
        """Add a turn and return it; a turn that was read from the store before only gets its tokens."""
        known = self.by_id.get(turn.turn_id)
        if known is not None:
            known.tokens = known.tokens or turn.tokens
            return known
        self.by_id[turn.turn_id] = turn
        for index, digest in (
            (self.by_history, turn.history_digest),
            (self.by_dialogue, turn.dialogue_digest),
            (self.by_prompt, turn.prompt_digest),
        ):
            index[digest] = (*index.get(digest, ()), turn)
        texts = (turn.turn_id, turn.reasoning, *turn.call_ids)
        self.num_bytes += TURN_BYTES + sum(map(sys.getsizeof, texts))
        if turn.about is not None:
            self.num_bytes += turn.about.num_bytes
        parent = self.by_id.get(turn.parent_turn_id or "")
        if parent is not None:
            parent.has_child = parent.has_child or not turn.is_aborted
            turn.parent_turn_id = parent.turn_id
            turn.chain_id = parent.chain_id if turn.chain_id == parent.chain_id else turn.chain_id
        return turn

    def left_out(self, parent: KnownTurn | None, conversation: ConversationDigests) -> list[KnownTurn]:
        """Return the turns after `parent` whose prompt a conversation repeats, and whose reply it leaves out."""
        parent_id, first = (None, 0) if parent is None else (parent.turn_id, parent.num_messages)
        digests = conversation.messages[first:]
        replies = set(conversation.replies[bisect.bisect_left(conversation.replies, first) :])
        prompts = [digest for end, digest in enumerate(digests, first + 1) if end not in replies]
        return [
            turn for digest in prompts for turn in self.by_prompt.get(digest, ()) if turn.parent_turn_id == parent_id
        ]

    def deepest(self, conversation: ConversationDigests, messages: Sequence[Json]) -> KnownTurn | None:
        """Return the turn that covers most of the conversation's messages up to the last reply.

        Of several turns with that history, prefer those whose tool-call ids the conversation repeats, then complete
        replies to those that were cut off, then the newest: a client that repeats a call has seen the last reply.
        """
        for end in range(conversation.num_replied - 1, -1, -1):
            turns = self.by_history.get(conversation.full[end], ())
            if len(turns) == 1:
                return turns[0]
            if turns:
                call_ids = repeated_calls(messages)
                same_run = [turn for turn in turns if self.call_ids(turn) & call_ids] or turns
                return ([turn for turn in same_run if not turn.is_aborted] or same_run)[-1]
        return None

    def break_reason(self, conversation: ConversationDigests, parent: KnownTurn | None = None) -> str | None:
        """Return why a conversation extends no turn, or the earlier one `parent`; None if it breaks nothing."""
        num_replied = conversation.num_replied
        first = 0 if parent is None else parent.num_messages
        if not self.by_id or num_replied <= first:
            left_out = [
                turn for turn in self.left_out(parent, conversation) if turn.prompt_digest != conversation.messages[-1]
            ]
            return None if all(turn.is_aborted for turn in left_out) else "edited_history"
        messages_digests = {turn.messages_digest for turn in self.by_id.values()}
        if not messages_digests.isdisjoint(conversation.messages[first:num_replied]):
            return "tools_changed"
        if any(
            conversation.dialogue[index] in self.by_dialogue
            for index in conversation.replies
            if first <= index < num_replied
        ):
            return "system_changed"
        return "edited_history"

    def call_ids(self, turn: KnownTurn) -> frozenset[str]:
        return frozenset().union(*(each.call_ids for each in self.ancestors(turn)))

    def ancestors(self, turn: KnownTurn) -> Iterable[KnownTurn]:
        """Yield the turn itself, then its ancestors, newest first."""
        current: KnownTurn | None = turn
        while current is not None:
            yield current
            current = self.by_id.get(current.parent_turn_id or "")
