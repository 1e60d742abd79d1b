import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.algorithms import assigned
from support.experience_factory import experience

from trainer.batch.advantages import uniform_groups

ONE_GROUP = [0, 0, 0, 0]
REWARDS = np.array([1.0, 2.0, 3.0, 6.0])
# Mean 3. Deviations -2, -1, 0, 3; squares 4 + 1 + 0 + 9 = 14.


def estimate(values, groups, name):
    batch = [
        experience(session_id=str(number), group_id=str(group), reward=float(value))
        for number, (value, group) in enumerate(zip(values, groups, strict=True))
    ]
    return np.array([turns[0] for turns in assigned(batch, name)])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # The others' means: 11/3, 10/3, 9/3, 6/3.
        ("rloo", [1 - 11 / 3, 2 - 10 / 3, 0, 4]),
        # sqrt(14 / 3) = 2.160247.
        ("grpo", [-0.925820, -0.462910, 0, 1.388730]),
        ("dr_grpo", [-2, -1, 0, 3]),
        ("reinforce_plus_plus", [-0.925820, -0.462910, 0, 1.388730]),
        ("reinforce_plus_plus_baseline", [-0.925820, -0.462910, 0, 1.388730]),
    ],
)
def test_each_algorithm_gives_the_numbers_worked_by_hand(name, expected):
    np.testing.assert_allclose(estimate(REWARDS, ONE_GROUP, name), expected, atol=1e-6)


def test_groups_are_centred_separately_but_whitened_together():
    """REINFORCE++ with a baseline subtracts each group's mean, then divides by one deviation for the whole batch."""
    values, groups = np.array([0.0, 2.0, 10.0, 14.0]), ["a", "a", "b", "b"]
    np.testing.assert_allclose(estimate(values, groups, "dr_grpo"), [-1, 1, -2, 2])
    # Deviations -1, 1, -2, 2: mean 0, squares 10, the deviation is sqrt(10 / 3) = 1.825742.
    expected = np.array([-1, 1, -2, 2]) / 1.825742
    np.testing.assert_allclose(estimate(values, groups, "reinforce_plus_plus_baseline"), expected, atol=1e-6)


def test_a_group_with_one_value_has_no_advantage():
    for estimator in ("rloo", "grpo", "dr_grpo"):
        assert estimate(np.array([5.0]), ["a"], estimator).tolist() == [0.0]


def test_equal_rewards_give_advantages_of_exactly_zero_despite_rounding():
    """0.1 eight times has a mean that is not 0.1; divided by epsilon, that error would become a gradient."""
    values = np.full(8, 0.1)
    for estimator in ("rloo", "grpo", "dr_grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        assert not estimate(values, [0] * 8, estimator).any()


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=20))
def test_centred_estimators_sum_to_zero_in_each_group(values):
    for estimator in ("rloo", "grpo", "dr_grpo"):
        advantages = estimate(np.array(values), [0] * len(values), estimator)
        assert abs(advantages.sum()) <= 1e-6 * max(1.0, np.abs(advantages).max()) * len(values)


def test_a_session_is_one_member_however_many_chains_it_has():
    """Session s has two chains and reward 1, session t one chain and reward 0: the mean is 1/2, not 2/3."""
    batch = [
        experience(session_id="s", reward=1.0),
        experience(session_id="s", reward=1.0),
        experience(session_id="t", reward=0.0),
    ]
    advantages = assigned(batch, "dr_grpo")
    assert [turns.tolist() for turns in advantages] == [[0.5], [0.5], [-0.5]]


def test_auto_follows_each_sessions_own_credit():
    step_wise = [
        experience(session_id=name, turns=2, turn_returns=returns, reward=9.0, group_id="a", credit="step_wise")
        for name, returns in (("s", (1.0, 4.0)), ("t", (3.0, 0.0)))
    ]
    propagated = [
        experience(session_id=name, turns=2, turn_returns=(0.0, 0.0), reward=reward, group_id="b", credit="propagate")
        for name, reward in (("u", 1.0), ("v", 0.0))
    ]
    advantages = assigned([*step_wise, *propagated], "dr_grpo")
    assert [turns.tolist() for turns in advantages] == [[-1, 2], [1, -2], [0.5, 0.5], [-0.5, -0.5]]


def test_a_group_is_uniform_when_no_turn_of_it_has_an_advantage():
    batch = [
        experience(session_id="s", reward=1.0, group_id="same"),
        experience(session_id="t", reward=1.0, group_id="same"),
        experience(session_id="u", reward=1.0, group_id="mixed"),
        experience(session_id="v", reward=0.0, group_id="mixed"),
    ]
    assert uniform_groups(batch, assigned(batch, "grpo")) == {("default", "same")}
