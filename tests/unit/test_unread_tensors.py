"""What the plug-in compares when vLLM reads a checkpoint: offered tensors against those that some operation took."""

import types
from typing import Any

import pytest
import torch
import transformers

from turnwise.engine_plugin.features.unread import refuse_unread

SIZES = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
LOST = "model.layers.0.self_attn.o_proj.bias"
NAMES = ("model.embed_tokens.weight", "model.language_model.norm.weight", LOST, "mtp.norm.weight", "lm_head.weight")


class Model:
    """A model whose loader has no place for a bias, a head of its own, and tensors that transformers has not."""


class DraftMTP(Model):
    """Drafts tokens, and reads few of the files."""


def load(model: Model, num_parts: int = 1, *, attention_bias: bool = True) -> list[str]:
    """Load a checkpoint as vLLM would, and return what was copied."""
    config = transformers.Qwen3Config(
        num_hidden_layers=1, vocab_size=8, attention_bias=attention_bias, tie_word_embeddings=True, **SIZES
    )
    copied: list[str] = []

    class Loader:
        def get_all_weights(self, _config: Any, _model: Any) -> Any:
            yield from ((name, torch.ones(4)) for name in NAMES)

        def load_weights(self, model: Any, model_config: Any) -> None:
            for name, tensor in self.get_all_weights(model_config, model):
                if name not in (LOST, "mtp.norm.weight", "lm_head.weight"):
                    torch.zeros(2).copy_(tensor[:2])
                    copied.append(name)

    refuse_unread(Loader, lambda: types.SimpleNamespace(world_size=num_parts))
    Loader().load_weights(model, types.SimpleNamespace(hf_text_config=config, model="m"))
    return copied


def test_a_tensor_that_transformers_computes_with_and_nothing_read_is_named():
    with pytest.raises(RuntimeError, match=rf"vLLM leaves out 1 tensors of 'm' .* such as '{LOST}': it would sample"):
        load(Model())


def test_what_transformers_does_not_compute_with_either_may_be_skipped():
    """The head is tied, the second head is of another model, and without `attention_bias` the bias is nobody's."""
    assert load(Model(), attention_bias=False) == list(NAMES[:2])


@pytest.mark.parametrize(("model", "num_parts"), [(DraftMTP(), 1), (Model(), 2)], ids=["a draft", "a pipeline's part"])
def test_a_process_that_has_a_part_of_the_model_refuses_nothing(model, num_parts):
    assert load(model, num_parts) == list(NAMES[:2])
