"""Turns into chains: every trainable token is trained once, and nothing else is."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.ledger_samples import make_turn

from turnwise.chains import (
    chain_paths,
    is_trainable,
    merge_chain,
    merge_session,
    split_session,
)
from turnwise.types import Outcome, Turn


def ids(paths: list[list[Turn]]) -> list[list[str]]:
    return [[turn.turn_id for turn in path] for path in paths]


def test_a_chain_is_the_concatenation_of_its_turns_with_the_prompts_masked():
    first = make_turn("t1")
    second = make_turn("t2", first)
    [chain] = merge_session([first, second])
    assert chain.tokens.tolist() == [10, 11, 12, 13, 20, 21, 22, 23]
    assert chain.loss_mask.tolist() == [False, False, True, True, False, False, True, True]
    assert chain.turn_index.tolist() == [-1, -1, 0, 0, -1, -1, 1, 1]
    assert chain.logprobs.tolist() == [0, 0, -1, -1.25, 0, 0, -2, -2.25]
    assert chain.prompt_length == 2
    assert [turn.turn_id for turn in chain.turns] == ["t1", "t2"]


def test_a_trunk_is_trained_in_the_first_chain_that_holds_it_and_masked_in_the_others():
    """t1 → t2 and t1 → t3: t1's tokens carry loss once."""
    trunk = make_turn("t1")
    left, right = make_turn("t2", trunk), make_turn("t3", trunk)
    first, second = merge_session([trunk, left, right])
    assert [turn.turn_id for turn in first.turns] == ["t1", "t2"]
    assert [turn.turn_id for turn in second.turns] == ["t3"]
    assert second.tokens.tolist() == [10, 11, 12, 13, 30, 31, 32, 33]
    assert second.turn_index.tolist() == [-1, -1, -1, -1, -1, -1, 0, 0]
    assert second.logprobs.tolist() == [0, 0, 0, 0, 0, 0, -3, -3.25]
    assert second.prompt_length == 6  # the whole trunk is context here


def test_an_aborted_attempt_does_not_split_the_chain_that_its_retry_continues():
    trunk = make_turn("t1")
    aborted = make_turn("t2", trunk, outcome=Outcome.ABORTED)
    retry = make_turn("t3", trunk)
    assert ids(chain_paths([trunk, aborted, retry])) == [["t1", "t3"]]


def test_a_chain_runs_through_an_untrainable_turn_with_its_tokens_masked():
    first = make_turn("t1", outcome=Outcome.UNTRAINABLE, reason="media")
    second = make_turn("t2", first)
    [chain] = merge_session([first, second])
    assert chain.tokens.tolist() == [10, 11, 12, 13, 20, 21, 22, 23]
    assert chain.loss_mask.tolist() == [False] * 6 + [True] * 2
    assert chain.prompt_length == 6


def test_tokens_after_the_last_trained_token_are_cut_off():
    first = make_turn("t1")
    chain = merge_chain([first, make_turn("t2", first, outcome=Outcome.ERROR)])
    assert chain.tokens.tolist() == [10, 11, 12, 13]


def test_a_session_with_nothing_to_train_has_no_chains():
    assert merge_session([make_turn("t1", outcome=Outcome.ABORTED)]) == []
    assert merge_session([make_turn("t1", token_ids=np.empty(0, np.int32), logprobs=np.empty(0, np.float32))]) == []
    assert merge_session([]) == []


def test_a_single_turn_has_its_whole_prompt():
    first = make_turn("t1")
    second = make_turn("t2", first)
    single, other = split_session([first, second, make_turn("t3", second, outcome=Outcome.ABORTED)])
    assert (single.tokens.tolist(), single.prompt_length) == ([10, 11, 12, 13], 2)
    assert (other.tokens.tolist(), other.prompt_length) == ([10, 11, 12, 13, 20, 21, 22, 23], 6)
    assert other.turn_index.tolist() == [-1, -1, -1, -1, -1, -1, 0, 0]


@st.composite
def forests(draw: st.DrawFn) -> list[Turn]:
    """Turns in order of `seq`, each a root or the child of an earlier one, some of them untrainable."""
    turns: list[Turn] = []
    for number in range(1, draw(st.integers(1, 12)) + 1):
        parent = draw(st.sampled_from([None, *turns]))
        outcome = draw(st.sampled_from([Outcome.EXACT, Outcome.RETOKENISED, Outcome.ABORTED, Outcome.UNTRAINABLE]))
        turns.append(dataclasses.replace(make_turn(f"t{number}", parent), outcome=outcome))
    return turns


@given(forests())
def test_every_trainable_token_is_trained_exactly_once(turns: list[Turn]) -> None:
    """For any forest, the tokens under the mask are those of the trainable turns, each once, in their context."""
    chains = merge_session(turns)
    trained = sorted(token for chain in chains for token in chain.tokens[chain.loss_mask].tolist())
    assert trained == sorted(token for turn in turns if is_trainable(turn) for token in turn.token_ids.tolist())
    by_id = {turn.turn_id: turn for turn in turns}
    for chain in chains:
        for k, turn in enumerate(chain.turns):
            at = int(np.argmax(chain.turn_index == k))
            assert at == turn.prompt_length  # each turn is conditioned on exactly its own prompt
            assert chain.logprobs[chain.turn_index == k].tolist() == turn.logprobs.tolist()
            assert by_id[turn.turn_id] is turn
