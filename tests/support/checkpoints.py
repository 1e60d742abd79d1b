"""Checkpoints for tests of reloading: the small model with noise on its weights, and its logprobs.

The logprobs of two versions differ by much more than the tolerance of the comparison between an engine and
`transformers`.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

NOISE = 0.02
"""Standard deviation of the noise that is added to each two-dimensional weight."""


def write_perturbed(model_dir: Path, place: Path, seed: int, *, noise: float = NOISE) -> Path:
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(model_dir / "model.safetensors")
    for tensor in tensors.values():
        if tensor.ndim == 2:
            tensor += noise * torch.randn(tensor.shape, generator=generator)
    return write_checkpoint(place, tensors, (model_dir / "config.json").read_text())


def write_checkpoint(place: Path, tensors: dict[str, torch.Tensor], config: str | None) -> Path:
    """Write a directory as a trainer does: under a temporary name, then renamed."""
    staging = place.with_name(f".{place.name}")
    staging.mkdir(parents=True)
    save_file(tensors, staging / "model.safetensors", {"format": "pt"})
    if config is not None:
        (staging / "config.json").write_text(config)
    return staging.replace(place)


def write_adapter(
    model_dir: Path,
    place: Path,
    seed: int,
    *,
    rank: int = 4,
    scale: float = 0.05,
    targets: Sequence[str] = ("q_proj", "v_proj"),
) -> Path:
    """Write a LoRA adapter of random factors, as peft writes one; by default for the query and value projections."""
    generator = torch.Generator().manual_seed(seed)
    base = load_file(model_dir / "model.safetensors")
    base.setdefault("lm_head.weight", base["model.embed_tokens.weight"])
    factors = {}
    for name, weight in base.items():
        if name.split(".")[-2] in targets:
            module = "base_model.model." + name.removesuffix(".weight")
            factors[f"{module}.lora_A.weight"] = torch.randn(rank, weight.shape[1], generator=generator)
            factors[f"{module}.lora_B.weight"] = scale * torch.randn(weight.shape[0], rank, generator=generator)
    place.mkdir(parents=True)
    save_file(factors, place / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model_dir),
        "r": rank,
        "lora_alpha": rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
    }
    (place / "adapter_config.json").write_text(json.dumps(config))
    return place


def copied(model_dir: Path, place: Path, *names: str) -> Path:
    place.mkdir(parents=True)
    for name in names:
        shutil.copy(model_dir / name, place)
    return place


Forward = Callable[[Sequence[int], int], torch.Tensor]
"""Maps token ids [N] and the length of the prompt to the logprobs of the tokens after it, [N - prompt]."""


def forward_of(directory: Path, adapter: Path | None = None) -> Forward:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, adapter).eval()

    def forward(token_ids: Sequence[int], prompt_length: int) -> torch.Tensor:
        ids = torch.tensor(token_ids, dtype=torch.long)[None]
        with torch.inference_mode():
            logits = model(ids).logits[0, prompt_length - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, ids[0, prompt_length:, None])[:, 0]

    return forward


def with_probe(directory: Path, forward: Forward) -> Path:
    """Write a trainer's probe beside a version's weights."""
    token_ids = list(range(40, 88))
    logprobs = forward(token_ids, 1).tolist()
    (directory / "turnwise.json").write_text(json.dumps({"probe": {"token_ids": token_ids, "logprobs": logprobs}}))
    return directory
