"""The cache keeps the tokens of whole sessions, up to a number of bytes."""

from __future__ import annotations

import numpy as np

from proxy.continuation.encoded_ids import PIECE_BYTES, EncodedIds, encode_ids
from proxy.continuation.forest import KnownTurn
from proxy.continuation.memory import LiveSession, LiveSessions
from turnwise.types import Session

TEN_IDS = np.full(10, 1234, np.int32)
SIZE = 49 + PIECE_BYTES
"""Ten numbers of four digits, nine commas, and the objects."""


def added(cache: LiveSessions, live: LiveSession, turn_id: str, parent: KnownTurn | None = None) -> KnownTurn:
    before: EncodedIds | None = None if parent is None else parent.tokens
    turn = KnownTurn(
        turn_id=turn_id,
        parent_turn_id=parent and parent.turn_id,
        chain_id="c",
        num_messages=2,
        history_digest=b"h",
        messages_digest=b"m",
        dialogue_digest=b"d",
        tokens=encode_ids(TEN_IDS, before),
    )
    cache.add_turns(live, [turn])
    return turn


def live(cache: LiveSessions, name: str) -> LiveSession:
    session = LiveSession(Session(session_id=name))
    cache.put(session)
    return session


def test_the_turns_of_a_chain_share_the_tokens_of_their_ancestors():
    """Nine turns of ten ids each fit into nine times the memory of ten ids, though the last one has 90 ids."""
    cache = LiveSessions(10, 10**6, 9 * SIZE)
    session = live(cache, "s")
    turns = [added(cache, session, "0")]
    for number in range(1, 9):
        turns.append(added(cache, session, str(number), turns[-1]))
    assert all(turn.tokens is not None for turn in turns)
    assert turns[-1].tokens.decoded().tolist() == [1234] * 90


def test_the_least_recently_used_session_is_evicted_first():
    """There is memory for two turns, not for three."""
    cache = LiveSessions(10, 10**6, 2 * SIZE)
    sessions = [live(cache, "a"), live(cache, "b")]
    first = added(cache, sessions[0], "1")
    second = added(cache, sessions[1], "2")
    third = added(cache, sessions[0], "3", first)
    assert [turn.tokens is not None for turn in (first, second, third)] == [True, False, True]
