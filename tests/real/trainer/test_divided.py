"""Worlds of processes that shard a model, and its replicas: their numbers, their states, and what they refuse."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.gloo_worlds import WorldFailed, compiled_steps, run_world, sessions, steps, world_of
from support.ledger_samples import groups_by_status
from support.migrated import new_database
from support.tiny_models import EXPERTS, FAMILIES, load_model, make_model
from support.trainer_ledger import Rollouts, settings_for
from support.world_tasks import (
    FAILING_RANK,
    held_after_resume,
    refuse_routing,
    resume_and_train,
    train_ledger,
    write_first_process_last,
)
from torch import Tensor

from trainer.features.memory import MemoryLimits, read_limits
from trainer.main import check_startable
from turnwise.errors import SettingsError
from turnwise.features.experts import EXPERTS as ROUTING
from turnwise.features.page.updates import list_updates


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family, changes in FAMILIES.items():
        make_model(root / family, family, **changes)
    return root


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Losses, norms, logprobs and weights within 2e-5, 1e-3 of a norm, after three steps of AdamW at 1e-3."""
    assert found["losses"] == pytest.approx(expected["losses"], abs=2e-5)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-3)
    for name in ("logprobs", "text"):
        torch.testing.assert_close(found[name], expected[name], atol=1e-4, rtol=0)
    for kind in ("weights", "published"):
        assert found[kind].keys() == expected[kind].keys()
        for name, value in expected[kind].items():
            torch.testing.assert_close(found[kind][name], value, atol=5e-5, rtol=0)


@functools.cache
def alone(model: Path, algorithm: tuple[tuple[str, Any], ...] = ()) -> dict[str, Any]:
    """Return what one process computes; `algorithm` are the items of its settings."""
    return steps({"model": str(model)}, {"algorithm": dict(algorithm)} if algorithm else {})


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_two_processes_equal_one(models, family):
    assert_equal(world_of(2, {"model": str(models / family)}), alone(models / family))


@pytest.mark.slow
def test_two_processes_with_compiled_layers_equal_one_without(models):
    """The compiler traces each layer in both processes; with `compile` several processes shard as without."""
    found = run_world(2, compiled_steps, {"model": str(models / "Qwen3")}, {})
    assert all(each["num_graphs"] > 0 for each in found)
    assert_equal(found[0], alone(models / "Qwen3"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("division", [{}, {"replicas": 2}], ids=str)
def test_four_processes_equal_one_sharded_and_in_replicas(models, family, division):
    algorithm = {"name": "gspo", "kl_coef": 0.1}
    found = world_of(4, {"model": str(models / family)} | division, algorithm=algorithm)
    assert_equal(found, alone(models / family, tuple(algorithm.items())))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"replicas": 2}, "replicas=2 needs several processes"),
        ({"kind": "lora", "lora_targets": ["q_proj", "embed_tokens"]}, "vLLM loads no adapter of the embeddings"),
    ],
)
def test_combinations_that_are_not_supported_are_named_before_anything_is_loaded(tmp_path, changes, message):
    with pytest.raises(SettingsError, match=message):
        check_startable(settings_for(tmp_path, tmp_path, **changes))


def test_processes_that_replicas_does_not_divide_are_refused(models):
    with pytest.raises(WorldFailed) as failed:
        world_of(2, {"model": str(models / "Qwen3"), "replicas": 3})
    assert "2 processes cannot be divided by replicas=3: set a divisor" in failed.value.errors[0]


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    changes = {"num_key_value_heads": 4, "tie_word_embeddings": True}
    return {"model": str(make_model(tmp_path_factory.mktemp("models") / "model", **changes))}


def run(size: int, spec: dict[str, object], directory: Path, start: int, stop: int) -> tuple[dict, dict]:
    if size == 1:
        return resume_and_train(spec, directory, start, stop)
    return run_world(size, resume_and_train, spec, directory, start, stop, is_sharded=True)[0]


def assert_bitwise_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []


@pytest.mark.parametrize(
    ("size", "division", "steps"),
    [(2, {}, 1), pytest.param(4, {"replicas": 2}, 2, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_divided_run_resumes_bit_for_bit_and_one_process_reads_its_state(tmp_path, spec, size, division, steps):
    """Some steps, a state, new processes and as many steps give the weights and moments of all steps in a row."""
    _, straight = run(size, spec | division, tmp_path / "straight", 0, 2 * steps)
    _, written = run(size, spec | division, tmp_path / "resumed", 0, steps)
    read, resumed = run(size, spec | division, tmp_path / "resumed", steps, 2 * steps)
    assert_bitwise_equal(read, written)
    assert_bitwise_equal(resumed, straight)
    assert_bitwise_equal(run(1, spec, tmp_path / "resumed", 2 * steps, 2 * steps)[0], straight)


@pytest.mark.parametrize(
    ("size", "division"), [(2, {}), pytest.param(4, {"replicas": 2}, marks=pytest.mark.slow)], ids=str
)
def test_hosts_with_directories_of_their_own_pass_a_state_on_bit_for_bit_as_those_that_share_one(
    tmp_path, spec, size, division
):
    """Only the first one's is used; it may become the shared one, or have been that."""
    _, straight = run(size, spec | division, tmp_path / "straight", 0, 3)
    of_each, of_first = tmp_path / "host-{}", tmp_path / "host-0"
    run(size, spec | division, of_each, 0, 1)
    read, after = run(size, spec | division, of_each, 1, 2)
    assert_bitwise_equal(read, run(1, spec, of_first, 1, 1)[0])
    shared, resumed = run(size, spec | division, of_first, 2, 3)
    assert_bitwise_equal(shared, after)
    assert_bitwise_equal(resumed, straight)
    assert_bitwise_equal(run(size, spec | division, of_each, 3, 3)[0], straight)
    assert [found.name for found in sorted(tmp_path.iterdir())] == ["host-0", "straight"]


def test_a_damaged_state_ends_all_processes_of_hosts_with_directories_of_their_own(tmp_path, spec):
    of_each = tmp_path / "host-{}"
    run(2, spec, of_each, 0, 1)
    next((tmp_path / "host-0" / "v000001.trainer" / "tensors").glob("*.distcp")).unlink()
    with pytest.raises(WorldFailed) as failed:
        run(2, spec, of_each, 1, 2)
    assert failed.value.num_hanging == 0
    for rank in range(2):
        assert "tensors' cannot be read, or does not fit this model and optimizer" in failed.value.errors[rank]


def test_hosts_with_directories_of_their_own_train_and_check_older_samples_bit_for_bit_as_those_that_share_one(
    tmp_path, model
):
    """Each batch is of a new start; the last one is compared under the weights of version 1, read from its state."""
    weights = {}
    for name, policies in {"shared": "policies", "own": "policies-{}"}.items():
        directory = tmp_path / name
        directory.mkdir()
        db = new_database(directory / "ledger.db")
        first = directory / policies.format(0)
        settings = settings_for(directory, model, policies_dir=directory / policies, groups_per_batch=2)
        for batch, version in enumerate([0, 1, 1], start=1):
            served = model if version == 0 else first / "v000001"
            Rollouts(db, load_model(served), version=version).play(str(batch), num_groups=2, seed=batch)
            assert run_world(2, train_ledger, settings.model_copy(update={"total_batches": batch})) == [batch] * 2
        weights[name] = load_file(first / "v000003" / "model.safetensors")
        with db.read() as conn:
            assert [update.metrics["logprob_gap_coverage"] for update in list_updates(conn)[0]] == [1.0] * 3
        db.close()
    assert_bitwise_equal(weights["own"], weights["shared"])
    assert not (tmp_path / "own" / "policies-1").exists()


def test_no_process_writes_its_shards_before_the_first_one_has_cleared_the_directory(tmp_path):
    """A killed trainer may have left files there; shards that are written before they are removed would be lost."""
    assert all(run_world(2, write_first_process_last, tmp_path))
    assert (tmp_path / "v000001.trainer").is_dir()


@pytest.mark.slow
def test_each_process_of_a_resumed_run_holds_its_shards_and_does_not_read_the_base_model(tmp_path, spec):
    """Two processes hold half of the weights and of the moments each; only shards are read, by each process."""
    run(1, spec, tmp_path, 0, 1)
    whole = 3 * sum(weight.numel() for weight in load_model(spec["model"]).parameters())
    assert run_world(2, held_after_resume, spec, tmp_path, 1) == [whole // 2, whole // 2]


@pytest.mark.slow
def test_each_layout_reads_the_state_of_another_one_bit_for_bit(tmp_path, spec):
    """The weights after all of them are within 5e-5 of those of one uninterrupted process."""
    layouts: list[tuple[int, dict[str, int]]] = [(4, {}), (2, {}), (4, {"replicas": 2}), (1, {}), (2, {})]
    written: dict[str, Tensor] = {}
    for step, (size, division) in enumerate(layouts):
        read, after = run(size, spec | division, tmp_path / "passed on", step, step + 1)
        if step:
            assert_bitwise_equal(read, written)
        written = after
    _, expected = run(1, spec, tmp_path / "one", 0, len(layouts))
    for name, value in expected.items():
        torch.testing.assert_close(written[name], value, atol=5e-5, rtol=0)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return make_model(tmp_path / "experts", "Qwen3Moe", **EXPERTS)


@pytest.mark.parametrize("policies", ["policies", "policies-{}"])
def test_a_process_that_runs_out_of_memory_ends_the_others_and_after_the_restart_its_group_is_refused(
    tmp_path, model, ledger, policies
):
    """One process fails in the second layer while the other one gathers its weights.

    `turnwise up` starts processes that died again; both groups of short chains are trained then.
    """
    Rollouts(ledger, load_model(model)).play("short", num_groups=2)
    Rollouts(ledger, load_model(model), num_turns=8).play("long", num_groups=1)
    settings = settings_for(tmp_path, model, policies_dir=tmp_path / policies, row_tokens=1, total_batches=1)
    for _ in range(3):  # nothing is left out before activations are recomputed and each row's gradient is reduced
        with pytest.raises(WorldFailed) as failed:
            run_world(2, train_ledger, settings, longest_row=30)
        assert "does not fit into the device's memory" in failed.value.errors[1]
        assert failed.value.num_hanging == 0
    limits = read_limits(tmp_path / policies.format(FAILING_RANK))
    assert limits == MemoryLimits(checkpoints_layers=True, syncs_every_row=True, chain_tokens=limits.chain_tokens)
    assert limits.chain_tokens > 30
    assert run_world(2, train_ledger, settings, longest_row=30) == [1, 1]
    assert groups_by_status(ledger) == {"dropped": 1, "trained": 2}


def test_turns_that_were_routed_in_another_model_are_refused_by_all_processes_before_a_row_is_computed(
    tmp_path, experts
):
    """One session of twelve has routing of one layer; a process that alone computed its row would end the others."""
    found = sessions()
    bad = found.pop()
    routing = np.zeros((len(bad.tokens), 1, 2), np.int16)
    results = run_world(2, refuse_routing, experts, found, dataclasses.replace(bad, parts={ROUTING: routing}))
    assert len(results) == 2
    for reason, logprobs in results:
        assert reason.startswith("turns were routed to 2 experts in each of 1 layers, and this model routes to 2")
        assert logprobs.abs().sum() > 0
