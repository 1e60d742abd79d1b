"""Directories in the form of checkpoints, for engines that load no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

WEIGHTS = {"w": np.zeros(1, np.float32)}
FACTORS = {"layer.lora_A.weight": np.zeros((1, 1), np.float32)}

Tensors = Mapping[str, np.ndarray]


def write_weights(place: Path, tensors: Tensors = WEIGHTS, **config: object) -> Path:
    """Write whole weights."""
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), place / "model.safetensors")
    return place


def write_adapter(place: Path, factors: Tensors = FACTORS, **config: object) -> Path:
    """Write a LoRA adapter."""
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1} | config))
    save_file(dict(factors), place / "adapter_model.safetensors")
    return place
