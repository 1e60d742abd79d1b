"""A small mixture of experts with random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

SIZES: dict[str, int] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
}


def write_experts(directory: Path, **changes: Any) -> Path:
    """Write a Qwen3-MoE of two layers, and return its directory; `changes` are fields of its configuration."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**SIZES | changes)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(directory)
    return directory
