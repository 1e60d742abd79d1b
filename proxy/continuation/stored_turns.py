"""Stored turns as the continuation knows them.

A turn is read with the messages that it adds. Values that depend on earlier messages start from those of its parent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from proxy.continuation.digests import prompt_digests
from proxy.continuation.forest import NO_ROOT, KnownTurn
from proxy.continuation.roles import read_root
from turnwise.types import Turn


class Digested(NamedTuple):
    """What the messages of turns are compared by, by the turns' ids."""

    prompts: dict[str, bytes]
    """The digest of the prompt's messages."""
    states: dict[str | None, Any]
    """The running hash after the reply."""


def digest_stored(turns: Sequence[Turn], by_id: Mapping[str, KnownTurn], fields: frozenset[str]) -> Digested:
    """Digest the messages of turns, in the order of their commits, that extend each other or turns in memory."""
    states: dict[str | None, Any] = {turn_id: turn.messages_state for turn_id, turn in by_id.items()}
    return Digested(prompt_digests(turns, states, fields), states)


def known_turns(turns: Sequence[Turn], digested: Digested, by_id: Mapping[str, KnownTurn]) -> list[KnownTurn]:
    """Return the turns with sampled tokens, in the order of their commits, as they are kept in memory.

    Args:
        turns: stored turns that are not in memory.
        digested: what their messages are compared by.
        by_id: the session's turns in memory.
    """
    found: dict[str, KnownTurn] = {}
    for turn in turns:
        if len(turn.token_ids):
            parent = found.get(turn.parent_turn_id or "") or by_id.get(turn.parent_turn_id or "")
            found[turn.turn_id] = _known_turn(turn, digested, 0 if parent is None else parent.num_messages)
    return list(found.values())


def _known_turn(turn: Turn, digested: Digested, num_before: int) -> KnownTurn:
    return KnownTurn.of(
        turn,
        read_root(turn.messages, turn.tools, turn.sampling) if turn.parent_turn_id is None else NO_ROOT,
        num_messages=num_before + len(turn.messages) + 1,
        prompt_digest=digested.prompts[turn.turn_id],
        messages_state=digested.states[turn.turn_id],
    )
