"""Computes rewards and returns from reward lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ledger_samples import make_turn

from turnwise.credit import SessionCredit, assign_credit, latest_lines, session_reward, shape_returns
from turnwise.types import Credit, Outcome, Reward, Turn


def line(value: float, name: str = "reward", *, turn: str | None = None, step: int | None = None) -> Reward:
    return Reward(session_id="s", value=value, name=name, turn_id=turn, step=step)


def steps(*of_turn: int) -> list[Turn]:
    return [make_turn(f"t{number}", step=step, seq=number - 1) for number, step in enumerate(of_turn, 1)]


def test_the_discount_is_applied_after_the_bonus_for_an_increase_over_the_raw_reward_of_the_step_before():
    """With c = 0.5: 1, 2 + 0.5·(2-1), 4 + 0.5·(4-2). Backwards with γ = 0.9: 5, 2.5 + 4.5 = 7, 1 + 6.3 = 7.3."""
    assert shape_returns([1, 2, 4], gamma=0.9, reward_bonus_coeff=0.5) == pytest.approx([7.3, 7, 5])


@given(st.lists(st.floats(-10, 10), max_size=8), st.floats(0, 1), st.floats(0, 2))
def test_returns_satisfy_their_recursion(raw: list[float], gamma: float, bonus: float) -> None:
    """G_t - γ·G_{t+1} = r_t + c·(r_t - r_{t-1}), the defining equation, at every step."""
    returns = shape_returns(raw, gamma, bonus)
    for t, value in enumerate(raw):
        later = gamma * returns[t + 1] if t + 1 < len(raw) else 0.0
        improved = bonus * (value - raw[t - 1]) if t else 0.0
        assert returns[t] - later == pytest.approx(value + improved, abs=1e-9)


def test_the_latest_line_of_a_target_and_name_replaces_earlier_ones():
    lines = [line(1), line(2, "style"), line(5), line(7, step=0)]
    assert [one.value for one in latest_lines(lines)] == [5, 2, 7]


def test_names_on_one_target_add_up():
    assert session_reward([line(1), line(2, "style")], Credit.PROPAGATE) == 3
    assert session_reward([line(1), line(2, "style")], Credit.STEP_WISE) == 3


def test_a_session_without_a_line_has_no_reward():
    assert session_reward([], Credit.PROPAGATE) is None


def test_with_propagated_credit_the_sessions_own_line_overrides_those_of_steps_and_turns():
    lines = [line(1, step=0), line(2, turn="t2")]
    assert session_reward(lines, Credit.PROPAGATE) == 3
    assert session_reward([*lines, line(10)], Credit.PROPAGATE) == 10
    assert session_reward([*lines, line(10)], Credit.STEP_WISE) == 13


@pytest.mark.parametrize("credit", Credit)
def test_the_named_rewards_of_a_session_are_the_parts_of_its_reward(credit):
    """With propagated credit the lines for the session alone count once there are any, also of their names."""
    lines = [line(1, "a", step=0), line(2, "a"), line(10, "b")]
    given = assign_credit(steps(0), lines, credit)
    assert given.by_name == {"a": 2 if credit is Credit.PROPAGATE else 3, "b": 10}
    assert sum(given.by_name.values()) == given.reward


def test_with_propagated_credit_every_turn_gets_the_sessions_reward_unshaped():
    credit = assign_credit(steps(0, 1), [line(2)], Credit.PROPAGATE, gamma=0.9, reward_bonus_coeff=0.5)
    assert credit.turn_rewards == credit.turn_returns == {"t1": 2, "t2": 2}


def test_with_step_wise_credit_every_turn_of_a_step_gets_the_steps_reward_and_its_return():
    """Step 0 has two turns and reward 1, step 1 reward 2; γ = 0.5 gives 1 + 0.5·2 = 2 and 2."""
    credit = assign_credit(steps(0, 0, 1), [line(1, step=0), line(2, step=1)], Credit.STEP_WISE, gamma=0.5)
    assert credit.turn_rewards == {"t1": 1, "t2": 1, "t3": 2}
    assert credit.turn_returns == {"t1": 2, "t2": 2, "t3": 2}
    assert credit.reward == 3


def test_with_step_wise_credit_a_turns_own_line_applies_to_it_and_counts_once_in_its_steps_return():
    """Step 0: 1 for the step, 4 more for t2, so 5 in all; step 1: 2; γ = 0.5.

    The step returns are 5 + 0.5·2 = 6 and 2. t2's reward 5 is the step's: return 6. t1's is 4 less: 2.
    """
    lines = [line(1, step=0), line(4, turn="t2"), line(2, step=1)]
    credit = assign_credit(steps(0, 0, 1), lines, Credit.STEP_WISE, gamma=0.5)
    assert credit.turn_rewards == {"t1": 1, "t2": 5, "t3": 2}
    assert credit.turn_returns == {"t1": 2, "t2": 6, "t3": 2}
    assert credit.reward == 7
    assert {turn_id: value for turn_id, value in credit.own_rewards.items() if value} == {"t2": 4}


def test_with_step_wise_credit_the_sessions_line_applies_to_its_last_trainable_step():
    """An aborted last call must not take the reward."""
    turns = [*steps(0, 1, 1), make_turn("t4", step=2, seq=3, outcome=Outcome.ABORTED)]
    credit = assign_credit(turns, [line(8)], Credit.STEP_WISE)
    assert credit.turn_rewards == {"t1": 0, "t2": 8, "t3": 8, "t4": 0}
    assert credit.reward == 8


@pytest.mark.parametrize("credit", Credit)
@pytest.mark.parametrize(("gamma", "bonus"), [(0.0, 0.0), (0.5, 0.0), (0.9, 0.3)])
def test_a_turns_shares_are_what_one_more_line_of_the_session_adds(credit, gamma, bonus):
    """With and without an aborted last call, two turns of a step, and a reward of a turn's own."""
    turns = [*steps(0, 0, 1, 3), make_turn("t5", step=4, seq=4, outcome=Outcome.ABORTED)]
    lines = [line(1, step=0), line(4, turn="t2"), line(2)]

    def given(*more: Reward) -> SessionCredit:
        return assign_credit(turns, [*lines, *more], credit, gamma=gamma, reward_bonus_coeff=bonus)

    before, after = given(), given(line(1, "other"))
    for turn in turns:
        rewards, returns = (
            found(after)[turn.turn_id] - found(before)[turn.turn_id]
            for found in (lambda one: one.turn_rewards, lambda one: one.turn_returns)
        )
        assert before.shares[turn.turn_id] == pytest.approx((rewards, returns))


def test_with_step_wise_credit_the_return_without_discount_and_bonus_is_the_reward():
    lines = [line(0.1, step=0), line(0.2, turn="t2"), line(0.7)]
    credit = assign_credit(steps(0, 0, 1), lines, Credit.STEP_WISE)
    assert credit.turn_returns == pytest.approx(credit.turn_rewards)


def test_a_session_without_turns_still_has_a_reward():
    assert assign_credit([], [line(3)], Credit.STEP_WISE).reward == 3


def test_a_turn_that_was_never_stored_has_its_order_as_its_step():
    """The store gives every turn a step; before that, each turn is its own."""
    turns = [make_turn("t1", seq=0), make_turn("t2", seq=1)]
    assert assign_credit(turns, [line(1, step=1)], Credit.STEP_WISE).turn_rewards == {"t1": 0, "t2": 1}
