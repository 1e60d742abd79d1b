"""Loading a policy's model."""

from __future__ import annotations

import pytest
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from trainer.policy.loading import _prepared
from trainer.policy.model import PolicySpec
from turnwise.errors import SettingsError
from turnwise.types import PolicyKind


def test_lora_of_a_model_whose_layers_have_other_names_says_which_it_has() -> None:
    """The default names are those of Llama; GPT-NeoX has one layer for query, key and value."""
    config = GPTNeoXConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    spec = PolicySpec(model="neox", kind=PolicyKind.LORA)
    layers = r"\['dense', 'dense_4h_to_h', 'dense_h_to_4h', 'query_key_value'\]"
    with pytest.raises(SettingsError, match=rf"names no layer of the model 'neox': set it in .*{layers}"):
        _prepared(GPTNeoXForCausalLM(config), spec)
    named = spec.model_copy(update={"lora_targets": ("query_key_value", "attention.dense")})
    trained = {
        name for name, each in _prepared(GPTNeoXForCausalLM(config), named).named_parameters() if each.requires_grad
    }
    assert {name.split("lora_")[0].split(".layers.0.")[1] for name in trained} == {
        "attention.query_key_value.",
        "attention.dense.",
    }
