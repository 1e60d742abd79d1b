"""Directories in the form of checkpoints, for engines that load no weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file


def write_weights(place: Path) -> Path:
    """Write whole weights."""
    place.mkdir()
    (place / "config.json").write_text("{}")
    save_file({"w": np.zeros(1, np.float32)}, place / "model.safetensors")
    return place


def write_adapter(place: Path) -> Path:
    """Write a LoRA adapter."""
    place.mkdir()
    (place / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1}')
    save_file({"layer.lora_A.weight": np.zeros((1, 1), np.float32)}, place / "adapter_model.safetensors")
    return place
