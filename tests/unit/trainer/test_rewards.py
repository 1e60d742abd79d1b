"""Rewards for training: weighted by name, normalised separately, shaped by length."""

import dataclasses

import numpy as np
import pytest
from support.algorithms import algorithm, assigned, selected
from support.experience_factory import experience

from trainer.batch.advantages import RewardRule, overlong_penalty, shape_rewards
from trainer.batch.batch import build
from trainer.update import not_finite


def named(session_id, rewards, **fields):
    made = experience(session_id=session_id, reward=sum(rewards.values()), **fields)
    return dataclasses.replace(made, rewards=rewards, metadata={"bonus": 2.0})


def test_named_rewards_are_weighted_by_hand():
    """3 * 1 + 1 * 2 = 5: names without a weight have weight 1. All turns of a propagated session get it."""
    (shaped,) = shape_rewards(
        [named("s", {"correct": 1.0, "style": 2.0}, turns=2)],
        RewardRule(reward_weights={"correct": 3}),
        algorithm().reward,
    )
    assert (shaped.reward, shaped.turn_returns.tolist()) == (5.0, [5.0, 5.0])


@pytest.mark.parametrize(("num_tokens", "penalty"), [(50, 0.0), (60, 0.2), (100, 1.0), (500, 1.0)])
def test_the_overlong_penalty_equals_the_numbers_worked_by_hand(num_tokens, penalty):
    """From 50 to 100 tokens it rises from 0 to 1: at 60 it is 10 / 50."""
    assert overlong_penalty(num_tokens, RewardRule(overlong_tokens=100)) == penalty


def test_step_by_step_the_overlong_penalty_is_taken_once_a_session_and_reaches_the_steps_before():
    """Eight sampled tokens of ten: penalty (8 - 5) / 5 = 0.6, on the session's last step, in its second chain.

    With γ = 0.5 over the steps 0 to 3 the returns lose 0.075, 0.15, 0.3 and 0.6.
    """
    shares = [[[0.0, 0.0], [0.125, 0.25]], [[0.0, 1.0], [0.5, 1.0]]]
    chains = [
        dataclasses.replace(
            experience(turns=2, turn_returns=(1.0, 2.0), reward=3.0, credit="step_wise"), turn_shares=np.array(share)
        )
        for share in shares
    ]
    shaped = shape_rewards(chains, RewardRule(overlong_tokens=10), algorithm().reward)
    returns = [one.turn_returns.tolist() for one in shaped]
    assert returns == [[pytest.approx(0.925), pytest.approx(1.85)], [pytest.approx(0.7), pytest.approx(1.4)]]
    assert [one.turn_rewards.tolist() for one in shaped] == [[0, 0], [0, pytest.approx(-0.6)]]
    assert [one.reward for one in shaped] == [pytest.approx(2.4)] * 2


def test_rewards_are_normalised_separately_by_hand():
    """GDPO: the large reward a and the small reward b count alike.

    Of (a, b): (0, 0), (100, 0), (0, 1), (100, 1). Each is normalised in its group to ± 0.866025: sums -1.732,
    0, 0, 1.732. Over the batch: squares 6, deviation sqrt(2) = 1.414214.
    """
    group = [
        named(f"s{i}", {"a": a, "b": b})
        for i, (a, b) in enumerate([(0.0, 0.0), (100.0, 0.0), (0.0, 1.0), (100.0, 1.0)])
    ]
    advantages = [turns[0] for turns in assigned(group, "gdpo")]
    np.testing.assert_allclose(advantages, [-1.224745, 0, 0, 1.224745], atol=1e-5)
    summed = [turns[0] for turns in assigned(group, "grpo")]
    assert abs(summed[1] - summed[2]) > 1.7  # summed first, a hides b


def test_a_session_without_a_named_reward_is_not_compared_by_that_name():
    """Of a: 1, 0 and none; of b: 0, 0, 1. Left out, a gives ± 0.707107 and nothing to the third.

    As a third 0 it would give the third the same as the second. Of b: mean 1/3, deviation 0.577350, so -0.577350 twice
    and 1.154701. Sums 0.129757, -1.284457, 1.154701, squares 3.000008, deviation sqrt(1.5) = 1.224746 over the batch.
    """
    named_rewards = ({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}, {"b": 1.0})
    group = [named(f"s{number}", rewards) for number, rewards in enumerate(named_rewards)]
    advantages = [turns[0] for turns in assigned(group, "gdpo")]
    np.testing.assert_allclose(advantages, [0.105946, -1.048755, 0.942809], atol=1e-4)


def test_long_and_truncated_chains_are_not_trained_but_count_in_the_baseline():
    """Rewards 1, 0, 0: without the two that are left out, nothing would be left to compare the first with."""
    good = experience(session_id="good", reward=1.0)
    long = experience(session_id="long", reward=0.0, turns=4)
    cut = dataclasses.replace(experience(session_id="cut", reward=0.0), is_cut=True)
    chosen = selected([good, long, cut], algorithm("dr_grpo"), max_chain_tokens=10, overlong_mask=True)
    assert [one.session_id for one in chosen.experiences] == ["good"]
    assert chosen.advantages[0].tolist() == [pytest.approx(2 / 3)]
    assert chosen.refused == {}


def test_a_group_of_long_chains_is_refused_with_the_reason():
    chosen = selected([experience(turns=4)], algorithm(), max_chain_tokens=10)
    assert chosen.refused == {("default", "g"): "chain_too_long: 12 tokens, max_chain_tokens=10"}


def test_dpo_pairs_every_better_session_with_every_worse_one():
    """Rewards 2, 1, 0: three pairs; one pair if only the best and the worst are compared."""
    group = [experience(session_id=f"s{reward}", reward=reward) for reward in (2.0, 1.0, 0.0)]
    found = {}
    for pairs in ("all", "best_worst"):
        chosen = selected(group, algorithm("dpo", pairs=pairs))
        found[pairs] = [(one.session_id, *pair) for one, pair in zip(chosen.experiences, chosen.pairs, strict=True)]
    assert [name for name, _, is_chosen in found["all"] if is_chosen] == ["s2.0", "s2.0", "s1.0"]
    assert {pair for _, pair, _ in found["all"]} == {0, 1, 2}
    assert found["best_worst"] == [("s2.0", 0, True), ("s0.0", 0, False)]


def test_a_value_just_over_the_limit_is_refused_by_a_reason_that_differs_from_the_limit():
    """The largest float32 numbers near a million are 1/16 apart. At the limit itself a value is trained."""
    sums = [experience(session_id=name, reward=reward) for name, reward in {"a": 1000000.5, "b": 0.0}.items()]
    refused = selected(sums, algorithm("grpo")).refused
    assert list(refused.values()) == ["reward_too_large: 1000000.5; rewards are trained up to 1e+06, scale them"]
    two = [experience(session_id=name, reward=0.0) for name in "ab"]
    batch = build(two, [np.array([1e6]), np.array([-1000000.0625])], policy_version=0)
    reason = "not_finite: a token has the advantage -1000000.0625; up to 1e+06 is trained, scale the rewards"
    assert not_finite(batch) == {two[1].group_key: reason}


def test_all_pairs_of_a_group_weigh_the_same():
    """Four sessions of rewards 3, 2, 1, 1: five pairs. The best and the worst ones are in more of them than others."""
    rewards = {"a": 3.0, "b": 2.0, "c": 1.0, "d": 1.0}
    group = [
        experience(session_id=name, reward=reward, turns=1 + n) for n, (name, reward) in enumerate(rewards.items())
    ]
    dpo = algorithm("dpo", pairs="all")
    chosen = selected(group, dpo)
    batch = build(chosen.experiences, chosen.advantages, policy_version=0, pairs=chosen.pairs)
    weights = dpo.weights(batch, range(len(batch.experiences)))
    of_pair = np.bincount(np.array(batch.unit_of)[batch.table.experience], weights=weights)
    np.testing.assert_allclose(of_pair, [1 / 5] * 5, atol=1e-6)
