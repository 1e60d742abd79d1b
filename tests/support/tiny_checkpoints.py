"""Directories in the form of checkpoints, for engines that load no weights."""

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from turnwise_fake_engine.sampling import logprobs_of

from turnwise.version_directory import MANIFEST

WEIGHTS = {"w": np.zeros(1, np.float32)}
FACTORS = {f"layer.lora_{name}.weight": np.zeros((1, 1), np.float32) for name in "AB"}

Tensors = Mapping[str, np.ndarray]


def write_weights(place: Path, tensors: Tensors = WEIGHTS, **config: object) -> Path:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), place / "model.safetensors")
    return place


def write_probe(place: Path, shift: float = 0.0) -> Path:
    """Write a trainer's probe beside the weights: a text, and the stand-in engine's logprobs of it, plus a shift."""
    text = [40, 41, 42, 43]
    logprobs = [logprobs_of(token, 1.0, count=0)[0] + shift for token in text[1:]]
    (place / MANIFEST).write_text(json.dumps({"probe": {"token_ids": text, "logprobs": logprobs}}))
    return place


def write_adapter(place: Path, factors: Tensors = FACTORS, **config: object) -> Path:
    place.mkdir()
    (place / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1} | config))
    save_file(dict(factors), place / "adapter_model.safetensors")
    return place
