"""Stored logprobs against a forward pass of the published files: `turnwise verify --forward`.

`transformers` computes them, with none of the code that trains or serves. So an engine that samples with other weights
than it was given is seen, which a comparison of the engine with itself cannot show.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cachetools
import torch

from turnwise.store.turns import TurnView
from turnwise.types import Json, PolicyKind, PolicyVersion
from turnwise.verify.engine import NOT_REPEATABLE
from turnwise.verify.report import Report
from turnwise.version_directory import MANIFEST, read_json

MODELS_KEPT = 2
"""Versions in memory: sessions that were played at the same time have neighbouring ones."""
MASKS: Mapping[str, float] = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
"""Sampling parameters that cut the distribution, with the values that do not."""


class ForwardChecker:
    """Recomputes the logprobs of turns from the files of the version that sampled them.

    Args:
        versions: All policy versions, by number.
        tolerance: Largest difference of logprobs, in nats, that is no mismatch.
    """

    def __init__(self, versions: Mapping[int, PolicyVersion], *, tolerance: float) -> None:
        self._versions = versions
        self._tolerance = tolerance
        self._models: cachetools.LRUCache[int, Any] = cachetools.LRUCache(MODELS_KEPT)

    def close(self) -> None:
        """Release the models."""
        self._models.clear()

    def check(self, view: TurnView, place: str, report: Report) -> None:
        """Compare a trainable turn's logprobs with those of its version's files."""
        turn = view.turn
        if reason := self._why_not(view):
            report.not_checked[reason] += 1
            return
        tokens = torch.tensor([*view.prompt_token_ids.tolist(), *turn.token_ids.tolist()])
        with torch.inference_mode():
            logits_TV = self._model(turn.policy_version_first)(tokens[None]).logits[0, turn.prompt_length - 1 : -1]
        log_p_TV = torch.log_softmax(logits_TV.float() / _temperature(turn.sampling), -1)
        now = log_p_TV.gather(1, tokens[turn.prompt_length :, None])[:, 0].tolist()
        for index, (stored, computed) in enumerate(zip(turn.logprobs.tolist(), now, strict=True)):
            report.compare_logprobs(stored, computed, self._tolerance, f"{place} logprobs[{index}]", "the files give")
        report.checked["turns with logprobs recomputed"] += 1

    def _why_not(self, view: TurnView) -> str | None:
        turn = view.turn
        if turn.policy_version_first != turn.policy_version_last:
            return "sampled under two versions"
        version = self._versions.get(turn.policy_version_first)
        if version is None or not Path(version.path).is_dir():
            return f"the files of version {turn.policy_version_first} are not on this machine"
        if any(turn.sampling.get(field) for field in NOT_REPEATABLE):
            return "sampled with a constraint that depends on earlier tokens"
        if any(turn.sampling.get(field, whole) not in (None, whole, -1) for field, whole in MASKS.items()):
            return "sampled from a part of the distribution"
        return None

    def _model(self, version: int) -> Any:
        """Return the model of a version, in float32 on the CPU."""
        if version not in self._models:
            self._models[version] = load_version(self._versions[version])
        return self._models[version]


def load_version(version: PolicyVersion) -> Any:
    """Return the model of a version's files, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    is_adapter = version.kind is PolicyKind.LORA and version.version > 0
    base = str(read_json(Path(version.path, MANIFEST))["base_model"]) if is_adapter else version.path
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    if is_adapter:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, version.path).eval()
    return model


def _temperature(sampling: Json) -> float:
    value = sampling.get("temperature")
    return float(value) if value else 1.0
