"""The cache keeps the tokens of whole sessions, up to a number of bytes."""

from __future__ import annotations

import numpy as np

from proxy.continuation.encoded_ids import PIECE_BYTES, EncodedIds, encode_ids
from proxy.continuation.forest import KnownTurn
from proxy.continuation.memory import LiveSession, TokenCache
from turnwise.types import Session

TEN_IDS = np.full(10, 1234, np.int32)
SIZE = 49 + PIECE_BYTES
"""Ten numbers of four digits, nine commas, and the objects."""


def added(cache: TokenCache, live: LiveSession, turn_id: str, parent: KnownTurn | None = None) -> KnownTurn:
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
    live.forest.add(turn)
    cache.add(live, turn)
    return turn


def live(name: str) -> LiveSession:
    return LiveSession(Session(session_id=name))


def test_the_turns_of_a_chain_share_the_tokens_of_their_ancestors():
    """Nine turns of ten ids each fit into nine times the memory of ten ids, though the last one has 90 ids."""
    cache, session = TokenCache(9 * SIZE), live("s")
    turns = [added(cache, session, "0")]
    for number in range(1, 9):
        turns.append(added(cache, session, str(number), turns[-1]))
    assert all(turn.tokens is not None for turn in turns)
    assert turns[-1].tokens.decoded().tolist() == [1234] * 90


def test_the_least_recently_used_session_is_evicted_first():
    """There is memory for two turns, not for three."""
    cache, sessions = TokenCache(2 * SIZE), [live("a"), live("b")]
    first = added(cache, sessions[0], "1")
    second = added(cache, sessions[1], "2")
    third = added(cache, sessions[0], "3", first)
    assert [turn.tokens is not None for turn in (first, second, third)] == [True, False, True]
