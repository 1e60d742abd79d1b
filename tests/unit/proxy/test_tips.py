"""Tokens in memory: those of the ends of chains, up to a number of bytes."""

from __future__ import annotations

from proxy.continuation.plan import KnownTurn
from proxy.continuation.sessions import Tips


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


def test_a_child_takes_its_parents_place():
    """So a long chain holds the tokens of its end alone, however many turns it has."""
    tips, turns = Tips(100), [known("0"), *(known(str(number), parent=str(number - 1)) for number in range(1, 10))]
    for turn in turns:
        tips.hold(turn)
    assert [turn.tokens is not None for turn in turns] == [False] * 9 + [True]


def test_what_was_held_for_longest_makes_room():
    """100 bytes hold two turns of 40, not three."""
    tips, turns = Tips(100), [known(str(number)) for number in range(4)]
    for turn in turns:
        tips.hold(turn)
    assert [turn.tokens is not None for turn in turns] == [False, False, True, True]


def test_a_turn_that_comes_again_counts_once():
    tips, turn, other = Tips(100), known("a"), known("b")
    for _ in range(5):
        turn = known("a")
        tips.hold(turn)
    tips.hold(other)
    assert turn.tokens is not None
    assert other.tokens is not None


def test_a_turn_larger_than_the_memory_is_not_held():
    tips, turn = Tips(10), known("a")
    tips.hold(turn)
    assert turn.tokens is None
