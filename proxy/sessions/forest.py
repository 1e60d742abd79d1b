"""The turns of a session in memory: a forest in which a turn extends its parent.

A turn takes about a thousand bytes, so the turns are the largest part of what a proxy remembers of a long session.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from proxy.sessions.conversation import Conversation
from proxy.sessions.digests import History, argument_digests, canonical_content, reply_digest, tool_call_ids
from proxy.sessions.encoded_ids import EncodedIds
from turnwise.types import Json, Outcome, Role, Turn

TURN_BYTES = 660
"""Memory of a turn without its id and texts: the object, its digests and times, and its index entries."""
FOREST_BYTES = 1_000
"""Memory of a forest without turns."""
TRUNCATION = "truncate_prompt_tokens"
"""Request field, stored with a turn's sampling, that lets the engine leave out the begin of a prompt."""
AGENTS = frozenset({Role.MAIN, Role.SUB_AGENT})
"""Roles of chains that are an agent's own work."""


class Root(NamedTuple):
    """What the first turn of a chain shows about the chain."""

    side_task: str | None
    """`roles.side_task` of its call."""
    system_digest: bytes
    """The digest of the system messages before the first other message."""


NO_ROOT = Root(None, b"")
"""Of a turn that extends another."""


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class KnownTurn:
    """The part of a stored turn that is needed to extend it."""

    turn_id: str
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
    """The thinking that was sampled."""
    call_ids: tuple[str, ...] = ()
    """Ids of the tool calls in its reply."""
    arguments: frozenset[bytes] = frozenset()
    """`argument_digests` of its reply."""
    reply_digest: bytes = b""
    """`digests.reply_digest` of its reply."""
    is_aborted: bool = False
    """Whether its reply was cut off."""
    is_truncated: bool = False
    """Whether the engine may have left out the begin of its prompt, as its call asked."""
    is_empty: bool = False
    """Whether its reply has neither text nor tool calls."""
    role: Role = Role.MAIN
    side_task: str | None = None
    """At the root of a chain: what it asks for, if that is not an agent's own work."""
    system_digest: bytes = b""
    """At the root of a chain: the digest of its system messages."""
    started_at: float = 0.0
    ended_at: float = 0.0
    """When its call started and ended; seconds since 1970."""
    has_child: bool = False
    """Whether a turn whose reply was not cut off extends it, or a call without its tokens went on from it."""
    tokens: EncodedIds | None = None
    """Prompt and sampled ids; None when they must be read from the store."""

    @classmethod
    def of(
        cls,
        turn: Turn,
        root: Root,
        *,
        num_messages: int,
        prompt_digest: bytes,
        chain_id: str | None = None,
        role: Role | None = None,
        tokens: EncodedIds | None = None,
    ) -> KnownTurn:
        """Return the part of a turn; the values that depend on its whole conversation and its chain are given."""
        started_at = turn.created_at.timestamp()
        return cls(
            turn_id=turn.turn_id,
            parent_turn_id=turn.parent_turn_id,
            chain_id=chain_id or turn.chain_id,
            num_messages=num_messages,
            history_digest=turn.history_digest,
            messages_digest=turn.messages_digest,
            dialogue_digest=turn.dialogue_digest,
            prompt_digest=prompt_digest,
            reasoning=turn.response.get("reasoning") or "",
            call_ids=tuple(tool_call_ids(turn.response)),
            arguments=argument_digests(turn.response),
            reply_digest=reply_digest(turn.response),
            is_aborted=turn.outcome is Outcome.ABORTED,
            is_truncated=turn.sampling.get(TRUNCATION) is not None,
            is_empty=not turn.response.get("tool_calls") and not canonical_content(turn.response.get("content")),
            role=role or turn.role or Role.MAIN,
            side_task=root.side_task,
            system_digest=root.system_digest,
            started_at=started_at,
            ended_at=started_at + turn.duration_seconds,
            tokens=tokens,
        )

    def num_bytes(self) -> int:
        """Return its memory, roughly, without its tokens."""
        texts = (self.turn_id, self.reasoning, self.side_task or "", self.reply_digest, *self.call_ids)
        return (
            TURN_BYTES
            + sum(map(sys.getsizeof, texts))
            + (sum(map(sys.getsizeof, (self.arguments, *self.arguments))) if self.arguments else 0)
        )


TurnIndex = dict[bytes, tuple[KnownTurn, ...]]
"""Turns by a digest, in the order in which they were added."""


@dataclasses.dataclass(slots=True)
class Forest:
    """The turns of one session, indexed by id and by conversation digest."""

    by_id: dict[str, KnownTurn] = dataclasses.field(default_factory=dict)
    by_history: TurnIndex = dataclasses.field(default_factory=dict)
    """Several turns have the same history where parallel agents got the same reply."""
    by_dialogue: TurnIndex = dataclasses.field(default_factory=dict)
    """The same without system messages, tools and template arguments."""
    by_prompt: TurnIndex = dataclasses.field(default_factory=dict)
    """By the digest of the prompt's messages."""
    agent_roots: dict[bytes, KnownTurn] = dataclasses.field(default_factory=dict)
    """The first root under each system message, of those that ask for an agent's own work."""
    side_roots: list[KnownTurn] = dataclasses.field(default_factory=list)
    """The other roots: each asks for what its `side_task` names."""
    has_empty_reply: bool = False
    """Whether one of the turns has an empty reply."""
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
        self.num_bytes += turn.num_bytes()
        self.has_empty_reply |= turn.is_empty
        if turn.parent_turn_id is None and turn.side_task is None:
            self.agent_roots.setdefault(turn.system_digest, turn)
        elif turn.parent_turn_id is None:
            self.side_roots.append(turn)
        parent = self.by_id.get(turn.parent_turn_id or "")
        if parent is not None:
            parent.has_child = parent.has_child or not turn.is_aborted
            turn.parent_turn_id = parent.turn_id
            turn.chain_id = parent.chain_id if turn.chain_id == parent.chain_id else turn.chain_id
        return turn

    def siblings(self, turn: KnownTurn) -> list[KnownTurn]:
        """Return the other turns that were sampled after the same prompt."""
        same = self.by_prompt[turn.prompt_digest]
        return [each for each in same if each.turn_id != turn.turn_id and each.parent_turn_id == turn.parent_turn_id]

    def left_out(self, parent: KnownTurn | None, history: History) -> list[KnownTurn]:
        """Return the turns after `parent` whose prompt a conversation repeats, and whose reply it leaves out."""
        parent_id, first = (None, 0) if parent is None else (parent.turn_id, parent.num_messages)
        replies = set(history.replies)
        prompts = [digest for end, digest in enumerate(history.messages[first:], first + 1) if end not in replies]
        return [
            turn for digest in prompts for turn in self.by_prompt.get(digest, ()) if turn.parent_turn_id == parent_id
        ]

    def deepest(self, conversation: Conversation) -> KnownTurn | None:
        """Return the turn that covers most of the conversation's messages up to the last reply.

        Of several turns with that history, prefer those whose tool-call ids the conversation repeats, then complete
        replies to those that were cut off, then the newest: a client that repeats a call has seen the last reply.
        """
        for end in range(conversation.num_replied - 1, -1, -1):
            turns = self.by_history.get(conversation.history.full[end], ())
            if len(turns) == 1:
                return turns[0]
            if turns:
                call_ids = conversation.call_ids()
                same_run = [turn for turn in turns if self.call_ids(turn) & call_ids] or turns
                return ([turn for turn in same_run if not turn.is_aborted] or same_run)[-1]
        return None

    def find_reply(self, messages: Sequence[Json]) -> KnownTurn | None:
        """Return the newest agent's turn whose reply the messages repeat, by the ids of its tool calls or its text."""
        call_ids = frozenset().union(*map(tool_call_ids, messages))
        texts = {reply_digest(message) for message in messages} - {b""}
        return next(
            (
                turn
                for turn in reversed(self.by_id.values())
                if turn.role in AGENTS and (not call_ids.isdisjoint(turn.call_ids) or turn.reply_digest in texts)
            ),
            None,
        )

    def call_ids(self, turn: KnownTurn) -> frozenset[str]:
        return frozenset().union(*(each.call_ids for each in self.ancestors(turn)))

    def ancestors(self, turn: KnownTurn) -> Iterable[KnownTurn]:
        """Yield the turn itself, then its ancestors, newest first."""
        current: KnownTurn | None = turn
        while current is not None:
            yield current
            current = self.by_id.get(current.parent_turn_id or "")
