"""Processes that divide the model or its rows compute what one process computes."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.forests import grown_forest
from support.gloo_worlds import compiled_steps, run_world, steps, world_of
from support.tiny_models import FAMILIES, config_of, make_model
from support.trainer_ledger import settings_for

from trainer.batch.forest import BLOCK, dense_mask
from trainer.main import check_startable
from trainer.model.division import ContextGroup, Division, check_divisible, divide_layers, part_of
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
def test_two_processes_that_divide_layers_experts_or_rows_equal_one(
    models: Path, family: str, division: dict[str, int]
):
    assert_equal(world_of(2, {"model": str(models / family)} | division), alone(models / family))


@pytest.mark.slow
@pytest.mark.parametrize("division", [{}, {"tensor_parallel": 2}], ids=str)
def test_two_processes_with_compiled_layers_equal_one_without(models: Path, division: dict[str, int]):
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
def test_four_processes_equal_one_however_they_divide_the_work(models: Path, family: str, division: dict[str, int]):
    algorithm = {"name": "gspo", "kl_coef": 0.1}
    found = world_of(4, {"model": str(models / family)} | division, algorithm=algorithm)
    assert_equal(found, alone(models / family, tuple(algorithm.items())))


@pytest.mark.parametrize("size", [2, 3, 8])
def test_the_parts_of_a_row_attend_to_the_same_tokens_as_the_whole_row_and_have_equal_costs(size: int):
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
def test_a_model_that_cannot_be_divided_is_named_with_the_setting_to_change(plan: dict[str, str], reason: str):
    model = transformers.LlamaForCausalLM(config_of("Llama"))
    model._tp_plan = plan
    with pytest.raises(SettingsError, match=rf"LlamaForCausalLM: transformers has {reason}.* Set tensor_parallel=1"):
        divide_layers(model, None)


def test_numbers_that_do_not_divide_are_refused_by_name(models: Path):
    with pytest.raises(SettingsError, match=r"6 processes cannot be divided by replicas=2, tensor_parallel=2"):
        Division(replicas=2, tensor=2).check(6)
    config = transformers.AutoConfig.from_pretrained(models / "Qwen3")
    with pytest.raises(SettingsError, match="does not divide the model's num_attention_heads=4"):
        check_divisible(config, 3)


def test_experts_that_do_not_divide_are_refused_by_name(models: Path):
    config = config_of("Qwen3Moe", num_attention_heads=8, num_key_value_heads=4, num_experts=6)
    with pytest.raises(SettingsError, match="tensor_parallel=4 does not divide the model's num_experts=6"):
        check_divisible(config, 4)
