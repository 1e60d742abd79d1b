"""Worlds of processes that divide layers, experts or rows: their numbers, their states, and what they refuse."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.forests import grown_forest
from support.gloo_worlds import WorldFailed, compiled_steps, run_world, sessions, steps, world_of
from support.ledger_samples import groups_by_status
from support.tiny_models import EXPERTS, FAMILIES, config_of, load_model, make_model
from support.trainer_ledger import Rollouts, settings_for
from support.world_tasks import (
    held_after_resume,
    refuse_routing,
    resume_and_train,
    train_ledger,
    write_first_process_last,
)
from torch import Tensor

from trainer.batch.forest import BLOCK, dense_mask
from trainer.main import check_startable
from trainer.model.division import ContextGroup, Division, check_divisible, divide_layers, part_of
from trainer.model.memory import MemoryLimits, read_limits
from turnwise.errors import SettingsError

CPU = torch.device("cpu")

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
"""Numbers that the divisions below divide."""
MORE_FAMILIES: dict[str, dict[str, Any]] = {"Mixtral": {"num_local_experts": 4}, "Olmo2": {}, "Qwen2": {}}
"""Families with other styles in transformers' plans: other experts, norms over all heads, biases."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for family, changes in (FAMILIES | MORE_FAMILIES).items():
        make_model(root / family, family, **HEADS, **changes)
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


@pytest.mark.parametrize(
    ("family", "division"),
    [
        ("Qwen3", {"context_parallel": 2}),
        ("Qwen3Moe", {"tensor_parallel": 2}),
        pytest.param("Qwen3", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("Mixtral", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("Olmo2", {"tensor_parallel": 2}, marks=pytest.mark.slow),
        pytest.param("Qwen2", {"tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_processes_that_divide_layers_experts_or_rows_equal_one(models, family, division):
    assert_equal(world_of(2, {"model": str(models / family)} | division), alone(models / family))


@pytest.mark.slow
@pytest.mark.parametrize("division", [{}, {"tensor_parallel": 2}], ids=str)
def test_two_processes_with_compiled_layers_equal_one_without(models, division):
    """The compiler traces each layer in both processes; with `compile` several processes shard as without."""
    found = run_world(2, compiled_steps, {"model": str(models / "Qwen3")} | division, {})
    assert all(each["num_graphs"] > 0 for each in found)
    assert_equal(found[0], alone(models / "Qwen3"))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "division",
    [
        {},
        {"replicas": 2},
        {"tensor_parallel": 2},
        {"context_parallel": 2},
        {"context_parallel": 4},
        {"replicas": 2, "tensor_parallel": 2},
        {"replicas": 2, "context_parallel": 2},
        {"tensor_parallel": 2, "context_parallel": 2},
    ],
    ids=str,
)
def test_four_processes_equal_one_however_they_divide_the_work(models, family, division):
    algorithm = {"name": "gspo", "kl_coef": 0.1}
    found = world_of(4, {"model": str(models / family)} | division, algorithm=algorithm)
    assert_equal(found, alone(models / family, tuple(algorithm.items())))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_parts_of_a_row_attend_to_the_same_tokens_as_the_whole_row_and_have_equal_costs(size):
    """Dense masks and FlexAttention's blocks; shares are within a tenth of the row of each other."""
    layout = grown_forest(0)[0].lay_out()
    whole = dense_mask(layout, CPU)
    costs = []
    for rank in range(size):
        part = part_of(layout, ContextGroup(None, rank, size), 0.1)
        own = part.stop - part.start
        costs.append(float((1 + 0.1 * layout.positions[part.start : part.stop]).sum()))
        mask = part.mask("turnwise_context", CPU)[0, 0, :own]
        place = torch.from_numpy(part.gathered_places())
        assert torch.equal(mask[:, place >= 0], whole[part.start : part.stop][:, place[place >= 0]])
        assert not mask[:, place < 0].any()
        blocks = part.mask("turnwise_context_flex", CPU)
        dense = blocks.mask_mod(None, None, torch.arange(own)[:, None], torch.arange(len(place))[None])
        assert torch.equal(dense, mask)
        for query in range(-(-own // BLOCK)):
            rows = mask[query * BLOCK : (query + 1) * BLOCK]
            partial = blocks.kv_indices[0, 0, query, : blocks.kv_num_blocks[0, 0, query]].tolist()
            full = blocks.full_kv_indices[0, 0, query, : blocks.full_kv_num_blocks[0, 0, query]].tolist()
            seen = {key for key in range(-(-len(place) // BLOCK)) if rows[:, key * BLOCK : (key + 1) * BLOCK].any()}
            assert seen <= {*partial, *full}
            assert all(rows[:, key * BLOCK : (key + 1) * BLOCK].all() for key in full)
    assert max(costs) - min(costs) < 0.1 * sum(costs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor_parallel": 2}, "tensor_parallel=2 needs several processes"),
        ({"tensor_parallel": 2, "multi_devices": True, "kind": "lora"}, "tensor_parallel divides whole weights"),
        ({"kind": "lora", "lora_targets": ["q_proj", "embed_tokens"]}, "vLLM loads no adapter of the embeddings"),
        ({"context_parallel": 2, "multi_devices": True, "compile": True}, "compile=true does not cover"),
        ({"context_parallel": 2, "multi_devices": True, "attention": "eager"}, "needs attention='sdpa'"),
    ],
)
def test_combinations_that_are_not_supported_are_named_before_anything_is_loaded(tmp_path, changes, message):
    with pytest.raises(SettingsError, match=message):
        check_startable(settings_for(tmp_path, tmp_path, **changes))


@pytest.mark.parametrize(
    ("plan", "reason"), [({}, "no plan"), ({"model.layers.*.mlp.up_proj": "packed_colwise"}, "a plan with 'packed_col")]
)
def test_a_model_that_cannot_be_divided_is_named_with_the_setting_to_change(plan, reason):
    model = transformers.LlamaForCausalLM(config_of("Llama"))
    model._tp_plan = plan
    with pytest.raises(SettingsError, match=rf"LlamaForCausalLM: transformers has {reason}.* Set tensor_parallel=1"):
        divide_layers(model, None)


def test_numbers_that_do_not_divide_are_refused_by_name(models):
    with pytest.raises(SettingsError, match=r"6 processes cannot be divided by replicas=2, tensor_parallel=2"):
        Division(replicas=2, tensor=2).check(6)
    config = transformers.AutoConfig.from_pretrained(models / "Qwen3")
    with pytest.raises(SettingsError, match="does not divide the model's num_attention_heads=4"):
        check_divisible(config, 3)


def test_experts_that_do_not_divide_are_refused_by_name(models):
    config = config_of("Qwen3Moe", num_attention_heads=8, num_key_value_heads=4, num_experts=6)
    with pytest.raises(SettingsError, match="tensor_parallel=4 does not divide the model's num_experts=6"):
        check_divisible(config, 4)


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
    [
        (2, {"tensor_parallel": 2}, 1),
        *(
            pytest.param(4, division, 2, marks=pytest.mark.slow)
            for division in (
                {"tensor_parallel": 2},
                {"context_parallel": 2},
                {"replicas": 2, "tensor_parallel": 2},
                {"tensor_parallel": 2, "context_parallel": 2},
            )
        ),
    ],
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
    layouts = [
        (4, {"tensor_parallel": 2}),
        (4, {}),
        (2, {"context_parallel": 2}),
        (4, {"replicas": 2}),
        (1, {}),
        (2, {"tensor_parallel": 2}),
    ]
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
    """One session of twelve has routing of one layer; a process that alone computed its row would end the others."""
    found = sessions()
    bad = found.pop()
    routing = np.zeros((len(bad.tokens), 1, 2), np.int16)
    results = run_world(2, refuse_routing, experts, found, dataclasses.replace(bad, routed_experts=routing))
    assert len(results) == 2
    for reason, logprobs in results:
        assert reason.startswith("turns were routed to 2 experts in each of 1 layers, and this model routes to 2")
        assert logprobs.abs().sum() > 0
