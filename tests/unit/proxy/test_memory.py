"""The memory of sessions and of their tokens: what counts, and what is dropped first above the limits."""

from __future__ import annotations

import numpy as np

from proxy.sessions.forest import PIECE_BYTES, EncodedIds, KnownTurn, encode_ids
from proxy.sessions.memory import LiveSession, LiveSessions
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


def test_sessions_above_the_limit_are_dropped_and_the_least_recent_first():
    """There is memory for two; the first is used again before the third is added."""
    scratch = LiveSessions(10, 10**6, 10**6)
    sessions = [live(scratch, name) for name in "abc"]
    for session in sessions:
        added(scratch, session, session.session.session_id)
    cache = LiveSessions(10, int(2.4 * sessions[0].num_bytes), 0)
    cache.put(sessions[0])
    cache.put(sessions[1])
    cache.find(sessions[0].key)
    cache.put(sessions[2])
    assert [cache.find(each.key) is not None for each in sessions] == [True, False, True]
    assert cache.num_bytes == sessions[0].num_bytes + sessions[2].num_bytes


def test_turns_of_a_session_count_and_those_of_a_dropped_session_do_not():
    """The only session is kept although it is too large; the next one replaces it."""
    cache = LiveSessions(10, 0, 10**6)
    first = live(cache, "a")
    turn = added(cache, first, "1")
    assert cache.num_bytes == first.num_bytes > LiveSession(first.session).num_bytes
    second = live(cache, "b")
    assert (len(cache), cache.num_bytes, turn.tokens) == (1, second.num_bytes, None)
    added(cache, first, "2")
    assert cache.num_bytes == second.num_bytes
    cache.clear()
    assert (len(cache), cache.num_bytes) == (0, 0)


def test_the_turns_of_a_chain_share_the_tokens_of_their_ancestors():
    """Nine turns of ten ids each fit into nine times the memory of ten ids, though the last one has 90 ids."""
    cache = LiveSessions(10, 10**6, 9 * SIZE)
    session = live(cache, "s")
    turns = [added(cache, session, "0")]
    for number in range(1, 9):
        turns.append(added(cache, session, str(number), turns[-1]))
    assert all(turn.tokens is not None for turn in turns)
    assert turns[-1].tokens.decoded().tolist() == [1234] * 90


def test_the_tokens_of_the_least_recently_used_session_are_dropped_first():
    """There is memory for two turns, not for three."""
    cache = LiveSessions(10, 10**6, 2 * SIZE)
    sessions = [live(cache, "a"), live(cache, "b")]
    first = added(cache, sessions[0], "1")
    second = added(cache, sessions[1], "2")
    third = added(cache, sessions[0], "3", first)
    assert [turn.tokens is not None for turn in (first, second, third)] == [True, False, True]
