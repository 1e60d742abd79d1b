"""Very small models with random weights, of any architecture of transformers, without a tokenizer."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

VOCABULARY = 48
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
    "dtype": "float32",
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"tie_word_embeddings": True},
    "Llama": {},
    "Gemma": {"tie_word_embeddings": True},
    "Qwen3Moe": EXPERTS | {"norm_topk_prob": True},
}
"""Architectures that differ in what the trainer has to know of them, with what they need besides the sizes."""


def config_of(family: str, **changes: Any) -> transformers.PretrainedConfig:
    """Return the configuration of a model of 15 thousand parameters; `changes` are fields of it."""
    config: transformers.PretrainedConfig = getattr(transformers, f"{family}Config")(**SIZES | changes)
    return config


def make_model(directory: Path, family: str = "Qwen3", *, seed: int = 0, **changes: Any) -> Path:
    """Write a model with this configuration; return its directory."""
    torch.manual_seed(seed)
    config = config_of(family, **changes)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory)
    return directory


def add_words(directory: Path) -> Path:
    """Give a model a tokenizer in which token 7 is the word `w7`, and 0 ends a reply; return its directory."""
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w1"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="w0").save_pretrained(directory)
    return directory


def quantise(directory: Path) -> None:
    """Store a model's projections as FP8, with one scale each, as checkpoints in blocks of 128 have them."""
    file, config = directory / "model.safetensors", directory / "config.json"
    stored: dict[str, torch.Tensor] = {}
    for name, value in load_file(file).items():
        stored[name] = value
        if name.endswith("_proj.weight"):
            stored[f"{name}_scale_inv"] = torch.full((1, 1), 1 / 16)
            stored[name] = (value * 16).to(torch.float8_e4m3fn)
    save_file(stored, file, metadata={"format": "pt"})
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": fp8}))


def pack_integers(directory: Path) -> dict[str, torch.Tensor]:
    """Store a model's projections as integers of 4 bits, as compressed-tensors has them; return what they stand for.

    Eight lie in a word, the lowest first and 8 above their value, and 16 of a row share a scale.
    """
    file, config = directory / "model.safetensors", directory / "config.json"
    stored, stands_for = load_file(file), {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        rows, columns = stored.pop(name).shape
        values, scale = torch.randint(-8, 8, (rows, columns)), torch.rand(rows, columns // 16)
        stands_for[name] = values * scale.repeat_interleave(16, 1)
        words = ((values + 8).reshape(rows, -1, 8) << torch.arange(0, 32, 4)).sum(-1)
        stored[f"{name}_packed"], stored[f"{name}_scale"] = words.to(torch.int32), scale
        stored[f"{name}_shape"] = torch.tensor([rows, columns])
    save_file(stored, file, metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 16}
    how = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    how |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}, "ignore": ["lm_head"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": how}))
    return stands_for


def load_model(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logprobs_of(model: torch.nn.Module, token_ids: Sequence[int]) -> torch.Tensor:
    tokens = torch.tensor([list(token_ids)])
    with torch.no_grad():
        log_p = model(tokens).logits[0, :-1].log_softmax(-1)
    return log_p.gather(1, tokens[0, 1:, None])[:, 0]
