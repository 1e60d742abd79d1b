"""A group whose logprobs differ from the trainer's is refused, alone, under the weights that sampled it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from safetensors.torch import load_file
from support.ledger_samples import groups_by_status
from support.migrated import new_database
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train

from trainer.checks import gap as gap_check
from turnwise.errors import EngineDisagrees
from turnwise.store import rewards, updates
from turnwise.types import Reward


def train_on(directory, model, **changes):
    """Train until the configured end; return the state."""
    return train(settings_for(directory, model, **({"max_versions_in_flight": None, "learning_rate": 3e-4} | changes)))


def play_stale(directory, model, *, version=1, gap=0.0, num_groups=3):
    """Make versions 1 and 2, and a ledger with groups of an older one; `gap` is the engine's error in the last one."""
    directory.mkdir()
    ledger = new_database(directory / "ledger.db")
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    train_on(directory, model, total_batches=2)
    sampler = load_model(model if version == 0 else directory / "policies" / f"v{version:06d}")
    rollouts = Rollouts(ledger, sampler, version=version)
    rollouts.play("b", num_groups=num_groups - 1, seed=1)
    dataclasses.replace(rollouts, gap=gap).play("c", num_groups=1, seed=2)
    return ledger


@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_a_group_of_constrained_sampling_is_refused_and_the_plain_ones_beside_it_are_trained(
    tmp_path, model, ledger, num_minibatches
):
    """A grammar's logprobs differ by 10 nats. The weights are those of a batch without that group."""
    plain = Rollouts(ledger, load_model(model))
    plain.play("plain", num_groups=2)
    dataclasses.replace(plain, gap=10.0).play("constrained", num_groups=1, seed=3)
    state = train_on(tmp_path, model, total_batches=1, num_minibatches=num_minibatches)
    assert state.progress.policy_version == 1
    assert groups_by_status(ledger) == {"trained": 2, "dropped": 1}
    assert (state.metrics["num_gap_refused_groups"], state.metrics["num_sessions"]) == (1, 12)
    assert state.metrics["logprob_gap"] < 1e-4 + (num_minibatches > 1)
    if num_minibatches > 1:
        return
    twin = tmp_path / "twin"
    twin.mkdir()
    other = new_database(twin / "ledger.db")
    Rollouts(other, load_model(model)).play("plain", num_groups=2)
    train_on(twin, model, total_batches=1, groups_per_batch=2)
    other.close()
    expected, found = (load_file(one / "policies/v000001/model.safetensors") for one in (twin, tmp_path))
    for name, value in expected.items():  # rows are packed in another order
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize("version", [0, 1])
def test_a_stale_group_is_refused_under_the_version_that_sampled_it_and_the_weights_are_put_back(
    tmp_path, model, version
):
    """An error of 0.5 nats is within what a policy may move, so only the sampling version's own weights show it."""
    ledger = play_stale(tmp_path / "run", model, version=version, gap=0.5)
    state = train_on(tmp_path / "run", model, total_batches=3)
    assert state.progress.policy_version == 3
    assert groups_by_status(ledger) == {"trained": 8, "dropped": 1}
    assert state.metrics["logprob_gap"] < 1e-5
    ledger.close()


def test_the_comparison_under_older_weights_changes_no_bit_of_the_training(tmp_path, model, monkeypatch):
    versions = []
    for name in ("with", "without"):
        play_stale(tmp_path / name, model).close()
        if name == "without":
            monkeypatch.setattr(gap_check.GapCheck, "_sample", lambda *_: [])
        state = train_on(tmp_path / name, model, total_batches=3)
        versions.append(load_file(tmp_path / name / "policies" / "v000003" / "model.safetensors"))
        coverage = state.metrics["logprob_gap_coverage"]
        assert coverage == (1.0 if name == "with" else 0.0)
        assert (state.metrics["logprob_gap"] < 1e-5) == (name == "with")
    assert all(torch.equal(value, versions[1][name]) for name, value in versions[0].items())


def test_each_batch_has_a_gap_also_between_two_comparisons(tmp_path, model):
    """Version 1 sampled two more batches: the second one is compared with the present weights alone."""
    ledger = play_stale(tmp_path / "run", model, num_groups=6)
    train_on(tmp_path / "run", model, total_batches=4, groups_per_batch=3)
    with ledger.read() as conn:
        newest, before, *_ = [record.metrics for record in updates.list_updates(conn)[0]]
    assert (before["logprob_gap_coverage"], newest["logprob_gap_coverage"]) == (1.0, 0.0)
    assert before["logprob_gap"] < 1e-5 < newest["logprob_gap"] < 1
    ledger.close()


def test_training_stops_if_nearly_all_groups_differ_and_keeps_the_last_ones(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model), gap=0.5).play("a", num_groups=12)
    with pytest.raises(EngineDisagrees, match=r"12 of the last 12 groups .* Check that the engine serves the weights"):
        train_on(tmp_path, model, total_batches=1, groups_per_batch=12)
    assert groups_by_status(ledger).get("dropped", 0) == 0
    assert not (tmp_path / "policies" / "v000001").exists()


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "reinforce_plus_plus"])
def test_a_reward_of_1e40_leaves_out_its_group_and_no_optimizer_step(tmp_path, model, ledger, name):
    rollouts = Rollouts(ledger, load_model(model))
    rollouts.play("plain", num_groups=2)
    rollouts.play("huge", num_groups=1, seed=3)
    with ledger.write() as conn:
        rewards.add_rewards(conn, [Reward(session_id="huge-0-1", name="profit", value=1.0)])
    state = train_on(tmp_path, model, total_batches=1, algorithm=name, reward_weights={"profit": 1e40})
    assert (state.metrics["num_skipped_updates"], state.metrics["num_sessions"]) == (0, 8)
    assert groups_by_status(ledger) == {"trained": 2, "dropped": 1}
