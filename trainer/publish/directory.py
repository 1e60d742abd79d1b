"""The directory of a finished version, and the record that the proxy acts on.

Each version carries a probe: a short text with the logprobs that the trainer's own forward pass gives it. The proxy
asks the engine for the same after a reload, and so checks that it serves these weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from trainer.policy.model import Policy
from trainer.publish.checkpoint import Checkpoints
from turnwise.experience import Experience
from turnwise.types import Json, PolicyVersion

PROBE_TOKENS = 48
"""Length of the probe's text."""


def base_version(model: str) -> PolicyVersion:
    """Return version 0: the base model as it is."""
    return PolicyVersion(version=0, path=str(Path(model).resolve()) if Path(model).is_dir() else model)


def write_version(
    checkpoints: Checkpoints,
    policy: Policy,
    weights: dict[str, torch.Tensor],
    *,
    version: int,
    parent: int,
    probe: Json,
) -> Path:
    """Write the directory that engines load; return it."""
    manifest = {"parent": parent, "kind": policy.spec.kind.value, "base_model": policy.spec.model, "probe": probe}
    return checkpoints.write_policy(version, lambda directory: policy.save(directory, weights), manifest).resolve()


def probe_of(policy: Policy, experiences: Sequence[Experience]) -> Json:
    """Return the beginning of the batch's first chain and the logprob of each of its tokens after those before it."""
    tokens = experiences[0].tokens[:PROBE_TOKENS].tolist()
    log_p_TV = policy.next_logprobs(tokens)
    followers = torch.tensor(tokens[1:], dtype=torch.long)
    is_coarse = policy.compute_dtype is torch.bfloat16
    return {
        "token_ids": tokens,
        "logprobs": log_p_TV[:-1].gather(1, followers[:, None])[:, 0].tolist(),
        "dtype": "bfloat16" if is_coarse else "float32",
    }
