"""Several processes that ran out of memory avoid the same row after their restart."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.migrated import new_database
from support.tiny_models import load_model, make_model
from support.trainer_ledger import Rollouts, settings_for

from trainer.model.agent import OutOfMemory
from trainer.model.memory import MemoryLimits, read_limits
from trainer.model.model import Policy
from trainer.parallel import World
from trainer.workflows import OnPolicyWorkflow


def failed(num_tokens, num_units, *, can_checkpoint=False):
    return OutOfMemory(num_tokens, dict.fromkeys(range(num_units)), can_checkpoint=can_checkpoint)


def test_nothing_is_left_out_before_everything_else_was_tried():
    """Activations, then the gradient, then rows; only a chain that is alone in its row bounds the chains."""
    limits = MemoryLimits().after(failed(4096, 1, can_checkpoint=True), is_pairs=False)
    assert limits == MemoryLimits(checkpoints_layers=True)
    limits = limits.after(failed(4096, 1), is_pairs=False)
    assert limits == MemoryLimits(checkpoints_layers=True, syncs_every_row=True)
    limits = limits.after(failed(4096, 3), is_pairs=False)
    assert (limits.row_tokens, limits.chain_tokens) == (2048, None)
    limits = limits.after(failed(2000, 2), is_pairs=False).after(failed(3000, 2), is_pairs=False)
    assert (limits.row_tokens, limits.chain_tokens) == (1000, None)
    assert limits.after(failed(900, 1), is_pairs=False).chain_tokens == 899
    assert limits.after(failed(900, 1), is_pairs=True).chain_tokens == 449


@pytest.mark.parametrize("row_tokens", [64, 1])
def test_after_a_restart_the_row_that_did_not_fit_is_not_computed_again(tmp_path, monkeypatch, row_tokens):
    """No row fits: the fourth start computes shorter ones, or no chain of 15 tokens, and says so in its settings."""
    model = make_model(tmp_path / "model")
    db = new_database(tmp_path / "ledger.db")
    Rollouts(db, load_model(model)).play("a", num_groups=3)
    settings = settings_for(tmp_path, model, row_tokens=row_tokens, total_batches=1, num_threads=1)
    rows = []

    def logprobs(_policy, inputs):
        rows.append(inputs.tokens.shape[1])
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("trainer.model.model.measured_alone", lambda *_: None)
    monkeypatch.setattr(Policy, "logprobs", logprobs)
    monkeypatch.setattr(World, "own", lambda _world, rows, _cost: [(row, True) for row in rows])
    monkeypatch.setattr(World, "from_first", lambda _world, ask: ask())
    monkeypatch.setattr(World, "share", lambda _world, item: item)
    found = []
    for _ in range(3):
        workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
        state = workflow.setup(0)
        found.append((workflow.agent.policy.is_checkpointed, len(rows)))
        workflow.agent.world.size = 2
        with pytest.raises(OutOfMemory):
            workflow.learn(state)
        workflow.agent.world.size = 1
        workflow.close()
    assert found == [(False, 0), (True, 1), (True, 2)]
    tried = MemoryLimits(checkpoints_layers=True, syncs_every_row=True)
    last = {"row_tokens": rows[0] // 2} if row_tokens == 64 else {"chain_tokens": 14}
    assert read_limits(tmp_path / "policies") == dataclasses.replace(tried, **last)
    restarted = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    restarted.setup(0)
    assert restarted.agent.row_tokens == (rows[0] // 2 if row_tokens == 64 else 1)
    assert restarted.config.max_chain_tokens == (None if row_tokens == 64 else 14)
    restarted.close()
    db.close()
