"""Stale tokens are compared with the engine's logprobs under the weights of the version that sampled them."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.trainer_ledger import Rollouts, load_model, new_ledger, settings_for

from trainer.loop.workflows import OnPolicyWorkflow


def train(directory, model, **changes):
    """Train until the configured end; return the state."""
    settings = settings_for(directory, model, max_versions_in_flight=None, **changes)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.learn(workflow.setup(0))
    workflow.close()
    return state


def play_stale(directory, model, gap=0.0):
    """Make versions 1 and 2, and a ledger with groups that version 1 sampled; `gap` is the engine's error."""
    directory.mkdir()
    ledger = new_ledger(directory / "ledger.db")
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    train(directory, model, total_batches=2)
    first = load_model(directory / "policies" / "v000001")
    Rollouts(ledger, first, version=1, gap=gap).play("b", num_groups=3, seed=1)
    ledger.close()


def test_stale_tokens_are_compared_under_their_own_version_and_the_weights_are_put_back(tmp_path, model, caplog):
    """Every token of the batch is stale; all are compared, and training is the same bit for bit as without that."""
    versions = []
    for name, every in (("with", 10), ("without", None)):
        play_stale(tmp_path / name, model)
        state = train(tmp_path / name, model, total_batches=3, gap_check_every=every)
        versions.append(load_file(tmp_path / name / "policies" / "v000003" / "model.safetensors"))
        if every:
            assert state.metrics["logprob_gap"] is None
            assert state.metrics["logprob_gap_stale"] < 1e-5
            assert (state.metrics["logprob_gap_stale_version"], state.metrics["logprob_gap_coverage"]) == (1, 1.0)
            assert "could be compared with the engine's logprobs" not in caplog.text
    assert "only 0.0 % of the trained tokens could be compared with the engine's logprobs" in caplog.text
    assert all(torch.equal(value, versions[1][name]) for name, value in versions[0].items())


def test_a_batch_of_stale_tokens_from_a_mismatched_engine_is_refused(tmp_path, model):
    play_stale(tmp_path / "run", model, gap=0.5)
    state = train(tmp_path / "run", model, total_batches=3)
    assert state.metrics["refused"].startswith("trainer and engine differ by 0.5 nats a token on tokens that version 1")
    assert state.progress.policy_version == 2


@pytest.mark.parametrize(("num_tokens", "share"), [pytest.param(1, 1 / 12, marks=pytest.mark.slow), (9, 2 / 12)])
def test_a_comparison_takes_whole_chains_until_it_has_enough_tokens(tmp_path, model, num_tokens, share):
    """12 chains of 2 turns of 4 tokens: 8 trained tokens each."""
    play_stale(tmp_path / "run", model)
    state = train(tmp_path / "run", model, total_batches=3, gap_check_tokens=num_tokens)
    assert state.metrics["logprob_gap_coverage"] == pytest.approx(share)
