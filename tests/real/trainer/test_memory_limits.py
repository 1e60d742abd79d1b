"""Several processes that ran out of memory avoid the same row after their restart."""

from __future__ import annotations

import pytest
import torch
from support.trainer_ledger import Rollouts, load_model, make_model, new_ledger, settings_for

from trainer.parallel import World
from trainer.policy.agent import OutOfMemory
from trainer.policy.memory import MemoryLimits, read_limits
from trainer.policy.model import Policy
from trainer.train import OnPolicyWorkflow


def test_a_row_of_several_chains_halves_the_rows_and_a_single_chain_bounds_the_chains():
    limits = MemoryLimits().after(4096, 3, is_pairs=False)
    assert limits == MemoryLimits(row_tokens=2048)
    limits = limits.after(2000, 2, is_pairs=False).after(3000, 2, is_pairs=False)
    assert limits == MemoryLimits(row_tokens=1000)
    assert limits.after(900, 1, is_pairs=False) == MemoryLimits(row_tokens=1000, chain_tokens=899)
    assert limits.after(900, 1, is_pairs=True) == MemoryLimits(row_tokens=1000, chain_tokens=449)


@pytest.mark.parametrize("packing", ["forest", "chain"])
def test_after_a_restart_the_row_that_did_not_fit_is_not_computed_again(tmp_path, monkeypatch, packing):
    """Rows of over 14 tokens do not fit: neither several chains in one row, nor a chain of 15 alone."""
    model = make_model(tmp_path / "model")
    db = new_ledger(tmp_path / "ledger.db")
    Rollouts(db, load_model(model)).play("a", num_groups=3)
    settings = settings_for(tmp_path, model, packing=packing, row_tokens=64, total_batches=1, num_threads=1)
    rows = []

    def logprobs(_policy, inputs):
        rows.append(inputs.tokens.shape[1])
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Policy, "logprobs", logprobs)
    monkeypatch.setattr(World, "own", lambda _world, rows, _cost: [(row, True) for row in rows])
    monkeypatch.setattr(World, "share", lambda _world, item: item)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.setup(0)
    workflow.agent.world.size = 2
    with pytest.raises(OutOfMemory):
        workflow.learn(state)
    workflow.agent.world.size = 1
    workflow.close()
    several = MemoryLimits(row_tokens=rows[0] // 2)
    assert read_limits(tmp_path / "policies") == (several if packing == "forest" else MemoryLimits(chain_tokens=14))
    restarted = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    restarted.setup(0)
    assert restarted.agent.row_tokens == (rows[0] // 2 if packing == "forest" else 64)
    assert restarted.config.max_chain_tokens == (None if packing == "forest" else 14)
    restarted.close()
    db.close()
