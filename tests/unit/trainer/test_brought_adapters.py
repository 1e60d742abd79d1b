"""Adapters that PEFT wrote, as a policy starts from them: computed as PEFT computes them, or refused by name."""

from pathlib import Path

import peft
import pytest
import torch
from support.tiny_models import load_model, logprobs_of, make_model

from proxy.reload.checkpoint import check_trainable
from trainer.features import Settings
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
    policy.load_adapter(place)
    expected = logprobs_of(peft.PeftModel.from_pretrained(load_model(model), place), TEXT)
    torch.testing.assert_close(logprobs_of(policy.model, TEXT), expected, atol=1e-6, rtol=0)
    assert all(torch.equal(before[name], weight) for name, weight in base_weights(policy).items())


@pytest.mark.parametrize("field", MORE_THAN_LORA)
def test_an_adapter_that_is_not_plain_lora_is_refused_by_its_field_and_changes_nothing(tmp_path, model, policy, field):
    """At `create`, and again by the trainer: what a policy starts from may have been changed since."""
    place = written(model, tmp_path / "adapter", **MORE_THAN_LORA[field])
    before = {name: one.clone() for name, one in policy.model.state_dict().items()}
    for refuse in (lambda: check_trainable(str(place)), lambda: policy.load_adapter(place)):
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
    for refuse in (lambda: check_trainable(str(place)), lambda: policy.load_adapter(place)):
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
        policy.load_adapter(place)
