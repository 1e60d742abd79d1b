"""The cache of tokens keeps the last turn of each chain, up to a number of bytes."""

from __future__ import annotations

from proxy.continuation.plan import KnownTurn
from proxy.continuation.token_cache import TokenCache


def known(turn_id: str, parent: str | None = None, size: int = 40) -> KnownTurn:
    return KnownTurn(
        turn_id=turn_id,
        parent_turn_id=parent,
        chain_id="c",
        num_messages=2,
        history_digest=b"h",
        messages_digest=b"m",
        dialogue_digest=b"d",
        tokens=bytes(size),
    )


def test_a_child_replaces_its_parent():
    """A long chain keeps the tokens of its last turn only."""
    cache, turns = (
        TokenCache(100),
        [known("0"), *(known(str(number), parent=str(number - 1)) for number in range(1, 10))],
    )
    for turn in turns:
        cache.add(turn)
    assert [turn.tokens is not None for turn in turns] == [False] * 9 + [True]


def test_the_oldest_entry_is_evicted_first():
    """100 bytes hold two turns of 40, not three."""
    cache, turns = TokenCache(100), [known(str(number)) for number in range(4)]
    for turn in turns:
        cache.add(turn)
    assert [turn.tokens is not None for turn in turns] == [False, False, True, True]


def test_a_turn_that_is_added_again_counts_once():
    cache, turn, other = TokenCache(100), known("a"), known("b")
    for _ in range(5):
        turn = known("a")
        cache.add(turn)
    cache.add(other)
    assert turn.tokens is not None
    assert other.tokens is not None


def test_a_turn_larger_than_the_cache_is_not_kept():
    cache, turn = TokenCache(10), known("a")
    cache.add(turn)
    assert turn.tokens is None
