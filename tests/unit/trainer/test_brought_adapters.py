"""Adapters that PEFT wrote, as a policy starts from them: computed as PEFT computes them, or refused by name."""

import json
import os
from pathlib import Path

import peft
import pytest
import torch
from support.tiny_models import load_model, logprobs_of, make_model

from proxy.reload.checkpoint import adapter_digest, check_headers, check_trainable
from trainer.features import Settings
from trainer.model.loading import load_adapter
from trainer.model.model import Policy
from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyKind

SHAPE = {"r": 4, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
TEXT = [3, 17, 9, 28, 41, 5]
MORE_THAN_LORA = {
    "modules_to_save": {"modules_to_save": ["norm"]},
    "use_rslora": {"use_rslora": True},
    "use_dora": {"use_dora": True},
    "alpha_pattern": {"alpha_pattern": {"layers.0.self_attn.q_proj": 64}},
    "rank_pattern": {"rank_pattern": {"layers.0.self_attn.q_proj": 2}},
    "trainable_token_indices": {"trainable_token_indices": [1, 2]},
    "bias": {"bias": "all"},
    "layers_to_transform": {"layers_to_transform": [0]},
    "layers_to_transform=0": {"layers_to_transform": 0},
    "init_lora_weights='pissa'": {"init_lora_weights": "pissa"},
    "init_lora_weights='olora'": {"init_lora_weights": "olora"},
}
"""Fields of PEFT's configuration that make an adapter more, or less, than our own."""


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), "Llama")


@pytest.fixture(scope="module")
def policy(model) -> Policy:
    spec = Settings(
        model=str(model), kind=PolicyKind.LORA, device="cpu", lora_rank=4, lora_targets=("q_proj", "v_proj")
    )
    policy = Policy(spec)
    policy.load(0)
    return policy


def written(model: Path, place: Path, **fields: object) -> Path:
    """Write an adapter with random values in each of its tensors; return its directory."""
    adapted = peft.get_peft_model(load_model(model), peft.LoraConfig(**SHAPE | fields))
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.2)
    adapted.save_pretrained(place)
    return place


def base_weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in policy.model.named_parameters() if not one.requires_grad}


def test_a_plain_adapter_gives_pefts_logprobs_and_leaves_the_base_bit_equal(tmp_path, model, policy):
    place = written(model, tmp_path / "adapter")
    check_trainable(str(place))
    before = base_weights(policy)
    load_adapter(policy.model, place)
    expected = logprobs_of(peft.PeftModel.from_pretrained(load_model(model), place), TEXT)
    torch.testing.assert_close(logprobs_of(policy.model, TEXT), expected, atol=1e-6, rtol=0)
    assert all(torch.equal(before[name], weight) for name, weight in base_weights(policy).items())


@pytest.mark.parametrize("field", MORE_THAN_LORA)
def test_an_adapter_that_is_not_plain_lora_is_refused_by_its_field_and_changes_nothing(tmp_path, model, policy, field):
    """At `create`, and again by the trainer: what a policy starts from may have been changed since."""
    place = written(model, tmp_path / "adapter", **MORE_THAN_LORA[field])
    before = {name: one.clone() for name, one in policy.model.state_dict().items()}
    for refuse in (lambda: check_trainable(str(place)), lambda: load_adapter(policy.model, place)):
        with pytest.raises(BadCheckpoint, match=rf"has {field.partition('=')[0]}="):
            refuse()
    assert all(torch.equal(before[name], one) for name, one in policy.model.state_dict().items())


def test_a_tensor_that_is_no_factor_is_refused_by_its_name_whatever_the_configuration_says(tmp_path, model, policy):
    """The final norm, saved under the name of the model's own weight, would overwrite it for all policies."""
    from safetensors.torch import load_file, save_file

    place = written(model, tmp_path / "adapter")
    file = place / "adapter_model.safetensors"
    save_file(load_file(file) | {"base_model.model.model.norm.weight": torch.zeros(32)}, file)
    before = base_weights(policy)
    for refuse in (lambda: check_trainable(str(place)), lambda: load_adapter(policy.model, place)):
        with pytest.raises(BadCheckpoint, match=r"no factor of LoRA, such as 'base_model.model.model.norm.weight'"):
            refuse()
    assert all(torch.equal(before[name], weight) for name, weight in base_weights(policy).items())


def test_an_adapter_without_some_of_the_trained_layers_is_refused(tmp_path, model, policy):
    from safetensors.torch import load_file, save_file

    place = written(model, tmp_path / "adapter")
    file = place / "adapter_model.safetensors"
    tensors = load_file(file)
    missing = min(tensors)
    save_file({name: each for name, each in tensors.items() if name != missing}, file)
    with pytest.raises(BadCheckpoint, match=rf"lacks '{missing}'"):
        load_adapter(policy.model, place)


def renamed(tensors, old, new):
    return {name.replace(old, new): each for name, each in tensors.items()}


def changed(tensors, part, change):
    return {name: change(name, each) if part in name else each for name, each in tensors.items()}


def halved(name, each):
    return (each[:2] if "lora_A" in name else each[:, :2]).contiguous()


MISREAD = {
    "a prefix of another model": (
        lambda t: renamed(t, "model.model.layers", "model.language_model.layers"),
        {},
        "calls it",
    ),
    "no prefix": (lambda t: renamed(t, "base_model.model.model.", "base_model.model."), {}, "calls it"),
    "a container twice": (lambda t: renamed(t, "model.model.layers", "model.model.model.layers"), {}, "calls it"),
    "a module that is not there": (lambda t: renamed(t, "q_proj", "query"), {}, "in none of its target_modules"),
    "r=8, tensors of rank 4": (dict, {"r": 8}, "rank 4 and 4 .* says 8"),
    "one layer of another rank": (
        lambda t: changed(t, "layers.0.self_attn.q_proj", halved),
        {},
        "rank 2 and 2 .* says 4",
    ),
    "A of another rank than B": (lambda t: changed(t, "layers.0.self_attn.q_proj.lora_A", halved), {}, "rank 2 and 4"),
    "a rank by pattern": (dict, {"rank_pattern": {"q_proj": 2}}, "rank 4 and 4 .* says 2"),
    "tensors beyond target_modules": (dict, {"target_modules": ["q_proj"]}, "v_proj.* none of its target_modules"),
    "int8": (lambda t: changed(t, "v_proj", lambda _, each: each.to(torch.int8)), {}, "as I8"),
    "half of a pair": (
        lambda t: {name: each for name, each in t.items() if "lora_B" not in name},
        {},
        "lacks .*lora_B",
    ),
    "no values": (lambda t: changed(t, "q_proj.lora_A", lambda _, each: each[:, :0].contiguous()), {}, "holds nothing"),
    **{
        f"{field}={value}": (dict, {field: value}, f"has {field}=")
        for field, values in {
            "r": (10**9, 0, -4, True, 4.0, "4", None),
            "lora_alpha": (1e308, float("nan"), float("inf"), 0, -8, "32", None, True),
            "rank_pattern": ({"q_proj": 10**9}, {"q_proj": 0}, ["q_proj"]),
        }.items()
        for value in values
    },
}
"""How an adapter is changed, in its tensors and its configuration, and what of the refusal names it."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory, model) -> Path:
    return written(model, tmp_path_factory.mktemp("plain") / "adapter")


def rewritten(plain: Path, place: Path, change, fields) -> Path:
    from safetensors.torch import load_file, save_file

    place.mkdir()
    config = json.loads((plain / "adapter_config.json").read_text())
    (place / "adapter_config.json").write_text(json.dumps(config | fields))
    save_file(change(load_file(plain / "adapter_model.safetensors")), place / "adapter_model.safetensors")
    return place


def test_the_unchanged_adapter_and_one_whose_ranks_are_in_its_pattern_are_taken(tmp_path, model, plain):
    check_headers(str(plain), PolicyKind.LORA, str(model))
    of_two = {"rank_pattern": {"layers.0.self_attn.q_proj": 2}}
    place = rewritten(plain, tmp_path / "a", lambda t: changed(t, "layers.0.self_attn.q_proj", halved), of_two)
    check_headers(str(place), PolicyKind.LORA, str(model))


@pytest.mark.parametrize("case", MISREAD)
def test_an_adapter_that_an_engine_would_serve_as_something_else_is_refused_by_what_is_wrong(
    tmp_path, model, plain, case
):
    """The engine took it, and served the model without it, with some of it, or at another scale."""
    change, fields, reason = MISREAD[case]
    place = rewritten(plain, tmp_path / "a", change, fields)
    with pytest.raises(BadCheckpoint, match=reason):
        check_headers(str(place), PolicyKind.LORA, str(model))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["a pipe", "a device", "a directory", "nothing"])
def test_what_is_no_regular_file_is_refused_before_it_is_opened(tmp_path, plain, name, kind):
    """A pipe gave no byte and /dev/zero no end, so that the read lasted for ever."""
    place = rewritten(plain, tmp_path / "a", dict, {})
    (place / name).unlink()
    make = {"a pipe": os.mkfifo, "a device": lambda path: path.symlink_to("/dev/zero"), "a directory": Path.mkdir}
    make.get(kind, lambda _: None)(place / name)
    for read in (lambda: check_headers(str(place), PolicyKind.LORA), lambda: adapter_digest(str(place))):
        with pytest.raises(BadCheckpoint, match=f"{name} .*(no regular file|cannot be read)"):
            read()


@pytest.mark.parametrize("text", [b"[" * 10**6, b" " * (2**20 + 1), b"\xff"], ids=["deep", "long", "no text"])
def test_a_configuration_that_no_adapter_has_is_refused_by_its_file(tmp_path, plain, text):
    place = rewritten(plain, tmp_path / "a", dict, {})
    (place / "adapter_config.json").write_bytes(text)
    with pytest.raises(BadCheckpoint, match=r"adapter_config.json (is not JSON|has \d+ bytes)"):
        check_headers(str(place), PolicyKind.LORA)
