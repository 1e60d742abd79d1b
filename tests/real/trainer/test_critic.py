"""The critic: GAE and its value loss by hand, and a run with a critic that resumes bit for bit."""

import dataclasses

import numpy as np
import pytest
import torch
from support.algorithms import close
from support.experience_factory import experience
from support.migrated import new_database
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train
from torch import tensor

from trainer.algorithms import gae
from trainer.batch.batch import build, turn_advantages
from trainer.main import check_startable
from trainer.workflows import OnPolicyWorkflow
from turnwise.errors import SettingsError

GAE_FAST = {"name": "gae", "critic_learning_rate": 0.02}


def test_gae_gives_the_numbers_worked_by_hand():
    """λ = 0.5, V = 1, 2, 4, rewards 0, 0, 8.

    δ = 0 + 2 - 1 = 1, 0 + 4 - 2 = 2, 8 - 4 = 4; A = 1 + 4 / 2 = 3, 2 + 4 / 2 = 4, 4.
    """
    rewards, states = np.array([0.0, 0.0, 8.0]), np.array([1.0, 2.0, 4.0])
    close(gae.gae(rewards, states, 0.5), [3.0, 4.0, 4.0])
    close(gae.gae(rewards, states, 1.0), [7.0, 6.0, 4.0])  # return minus value
    close(gae.gae(rewards, states, 0.0), [1.0, 2.0, 4.0])  # one step ahead alone


def test_the_value_loss_is_clipped_around_the_old_value_by_hand():
    """V_old = 1, R = 2, clip 0.2.

    V = 1.1: 0.9² / 2 = 0.405. V = 2: clipped to 1.2, max(0, 0.8²) / 2 = 0.32, without gradient.
    V = 0: max(4, 1.2²) / 2 = 2.
    """
    predicted = tensor([1.1, 2.0, 0.0], requires_grad=True)
    loss = gae.value_loss(predicted, tensor([1.0] * 3), tensor([2.0] * 3))
    close(loss.detach(), [0.405, 0.32, 2.0])
    loss.sum().backward()
    close(predicted.grad, [-0.9, 0.0, -2.0])


def test_rewards_follow_the_chain_or_each_step_by_hand():
    """Two turns of two tokens: the session's reward after all four, or 0.25 and 0.5 after the second and the fourth."""
    whole = experience(turns=2, reward=3.0)
    places = np.flatnonzero(whole.loss_mask)
    close(gae.token_rewards(whole, places), [0, 0, 0, 3.0])
    stepwise = experience(turns=2, reward=0.75, credit="step_wise")
    stepwise.turn_rewards[:] = [0.25, 0.5]
    close(gae.token_rewards(stepwise, places), [0, 0.25, 0, 0.5])
    close(gae.token_rewards(stepwise, places[:2]), [0, 0.75])  # the second turn is not trained


def test_a_reward_of_a_single_turn_of_a_step_is_given_after_that_turn_by_hand():
    """Three turns of two tokens; the first two are one step, whose own reward is 0.5.

    Own rewards of the turns: 1, 2 and 0; the second step's reward is 4. After credit assignment the turns' rewards are
    1 + 0.5, 2 + 0.5 and 4. The first turn's last token gets 1, the second's 2 + 0.5, the third's 4: 7.5 in all.
    """
    found = dataclasses.replace(
        experience(turns=3, reward=7.5, credit="step_wise"),
        turn_steps=(0, 0, 1),
        turn_rewards=np.array([1.5, 2.5, 4.0]),
        turn_own_rewards=np.array([1.0, 2.0, 0.0]),
    )
    close(gae.token_rewards(found, np.flatnonzero(found.loss_mask)), [0, 1, 0, 2.5, 0, 4])


def test_at_a_fork_each_chain_continues_with_its_own_next_token_by_hand():
    """Two chains share the prompt 1 and the sampled tokens 2, 3; the first trains them, the second only its own token.

    Values 0.1, 0.2, 0.3 for the first chain, 0.9 for the second; rewards 1 and 0; γ = λ = 1.
    Advantages before normalisation: 0.9, 0.8, 0.7 and -0.9, so returns are 1, 1, 1 and 0.
    """
    first = experience(session_id="a", reward=1.0, tokens=[1, 2, 3, 4], loss_mask=[False, True, True, True])
    second = experience(session_id="b", reward=0.0, tokens=[1, 2, 3, 5], loss_mask=[False, False, False, True])
    batch = build([first, second], [np.zeros(1)] * 2, policy_version=0)
    scored, gauges = gae.with_values(batch, [0, 1], np.array([0.1, 0.2, 0.3, 0.9], np.float32), gae.GAE.Settings())
    close(scored.table.returns, [1.0, 1.0, 1.0, 0.0])
    raw = np.array([0.9, 0.8, 0.7, -0.9])
    close(scored.table.advantages, (raw - raw.mean()) / (raw.std() + 1e-6))
    close(gauges["value_explained_variance"], 1 - raw.var() / np.var([1, 1, 1, 0]))
    close(turn_advantages(scored)[0], scored.table.advantages[:3].mean())


def test_a_session_that_does_not_fit_into_memory_counts_in_no_mean_by_hand():
    """Three sessions of two tokens, without the third: returns 1 and 0, values 0.5: advantages 1 and -1."""
    sessions = [experience(session_id=name, reward=reward) for name, reward in (("a", 1.0), ("b", 0.0), ("c", 9.0))]
    batch = build(sessions, [np.zeros(1)] * 3, policy_version=0)
    states = np.array([0.5, 0.5, 0.5, 0.5, 0.0, 0.0], np.float32)
    scored, gauges = gae.with_values(batch, [0, 1], states, gae.GAE.Settings())
    np.testing.assert_allclose(scored.table.advantages, [1, 1, -1, -1, 0, 0], atol=1e-5)
    assert gauges == {"value_mean": 0.5, "value_loss": 0.125, "value_explained_variance": 0.0}


CRITICS = [
    pytest.param({}, id="full"),
    pytest.param({"kind": "lora", "lora_rank": 4}, id="lora", marks=pytest.mark.slow),
]


def play(tmp_path, model, **changes):
    tmp_path.mkdir(exist_ok=True)
    db = new_database(tmp_path / "ledger.db")
    Rollouts(db, load_model(model)).play("a", num_groups=3, group_size=2)
    db.close()
    return settings_for(tmp_path, model, **({"algorithm": "gae", "row_tokens": 64, "max_staleness": 10} | changes))


def flat(tensors):
    if isinstance(tensors, dict):
        return {f"{name}/{key}": value for name, part in tensors.items() for key, value in flat(part).items()}
    return {"": tensors}


@pytest.mark.parametrize("critic", CRITICS)
def test_a_run_with_a_critic_resumes_bit_for_bit(tmp_path, model, critic):
    whole = train(play(tmp_path / "whole", model, groups_per_batch=1, total_batches=3, **critic))
    settings = play(tmp_path / "parts", model, groups_per_batch=1, total_batches=2, **critic)
    train(settings)
    resumed = train(settings.model_copy(update={"total_batches": 3}))
    expected, found = flat(whole.tensors()), flat(resumed.tensors())
    assert expected.keys() == found.keys()
    assert any(name.startswith("critic_optimizer/state") for name in expected)
    assert all(
        torch.equal(value, found[name]) if isinstance(value, torch.Tensor) else value == found[name]
        for name, value in expected.items()
    )


def test_the_critic_learns_to_predict_the_rewards(tmp_path, model):
    """The same 3 groups in 15 passes: the value loss falls to less than half."""
    settings = play(tmp_path, model, groups_per_batch=3, total_batches=1, algorithm=GAE_FAST)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.setup(0)
    claimed = workflow.claims.next(state.progress)
    chosen = workflow.updates.select(claimed, state)
    batch = build(chosen.experiences, chosen.advantages, policy_version=0)
    members = range(len(batch.experiences))
    losses = []
    for _ in range(15):
        scored, gauges = workflow.agent.algorithm.credit(batch, members, workflow.agent)
        losses.append(gauges["value_loss"])
        workflow.agent.gradient(state.optimizer, scored, members)
        workflow.agent.step(state.optimizer)
    workflow.close()
    assert losses[-1] < losses[0] / 2


def test_a_step_that_the_critics_gradient_stops_is_counted_and_logged(tmp_path, model, monkeypatch, caplog):
    """Neither the policy nor the critic moves, although the policy's own gradient is finite."""
    settings = play(tmp_path, model, groups_per_batch=3, total_batches=1)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.setup(0)
    before = [value.clone() for value in workflow.agent.policy.parameters()]
    clip, own = workflow.agent._clip, workflow.agent.heads[0].parameters()
    monkeypatch.setattr(workflow.agent, "_clip", lambda found: np.inf if found[0] is own[0] else clip(found))
    metrics, _ = workflow.step(state)
    assert (metrics["num_updates"], metrics["num_skipped_updates"], metrics["grad_norm"]) == (1, 1, None)
    assert all(torch.equal(*pair) for pair in zip(before, workflow.agent.policy.parameters(), strict=True))
    assert "optimizer step 1 is skipped: a gradient is not finite" in caplog.text
    workflow.close()


def test_a_critic_that_was_not_saved_starts_with_new_weights(tmp_path, model, caplog):
    """A run continues with GAE after another algorithm, and the log contains a line about the new critic."""
    settings = play(tmp_path, model, groups_per_batch=1, total_batches=1, algorithm="rloo")
    train(settings)
    train(settings_for(tmp_path, model, groups_per_batch=1, total_batches=2, row_tokens=64, algorithm="gae"))
    assert "the checkpoint has no critic" in caplog.text


def test_a_critic_is_refused_with_several_processes(tmp_path, model):
    settings = settings_for(tmp_path, model, algorithm="gae", multi_devices=True)
    with pytest.raises(SettingsError, match="set multi_devices=false"):
        check_startable(settings)
    with pytest.raises(SettingsError, match="set multi_devices=false"):
        OnPolicyWorkflow.build_from_config(settings, enable_jit=False).enable_shmap("data")
