"""What one of several processes refuses, all of them refuse, and none waits for another one forever."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from support.gloo_worlds import WorldFailed, run_world, sessions
from support.ledger_samples import groups_by_status
from support.tiny_models import EXPERTS, load_model, make_model
from support.trainer_ledger import Rollouts, settings_for
from support.world_tasks import refuse_routing, train_ledger

from trainer.model.memory import MemoryLimits, read_limits


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return make_model(tmp_path / "experts", "Qwen3Moe", **EXPERTS)


def test_a_process_that_runs_out_of_memory_ends_the_others_and_after_the_restart_its_group_is_refused(
    tmp_path, model, ledger
):
    """One process fails in the second layer while the other one gathers its weights.

    `turnwise up` starts processes that died again; both groups of short chains are trained then.
    """
    Rollouts(ledger, load_model(model)).play("short", num_groups=2)
    Rollouts(ledger, load_model(model), num_turns=8).play("long", num_groups=1)
    settings = settings_for(tmp_path, model, row_tokens=1, total_batches=1)
    for _ in range(3):  # nothing is left out before activations are recomputed and each row's gradient is reduced
        with pytest.raises(WorldFailed) as failed:
            run_world(2, train_ledger, settings, longest_row=30)
        assert "does not fit into the device's memory" in failed.value.errors[1]
        assert failed.value.num_hanging == 0
    limits = read_limits(settings.policies_dir)
    assert limits == MemoryLimits(checkpoints_layers=True, syncs_every_row=True, chain_tokens=limits.chain_tokens)
    assert limits.chain_tokens > 30
    assert run_world(2, train_ledger, settings, longest_row=30) == [1, 1]
    assert groups_by_status(ledger) == {"dropped": 1, "trained": 2}


def test_turns_that_were_routed_in_another_model_are_refused_by_all_processes_before_a_row_is_computed(
    tmp_path, experts
):
    """One session of twelve has routing of one layer, and lies in a row of one process."""
    found = sessions()
    bad = found.pop()
    routing = np.zeros((len(bad.tokens), 1, 2), np.int16)
    results = run_world(2, refuse_routing, experts, found, [dataclasses.replace(bad, routed_experts=routing)])
    assert len(results) == 2
    for reason, logprobs in results:
        assert reason.startswith("turns were routed to 2 experts in each of 1 layers, and this model routes to 2")
        assert logprobs.abs().sum() > 0
