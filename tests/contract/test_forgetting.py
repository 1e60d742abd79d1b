"""The measure of how far training changed a model on unrelated conversations."""

from __future__ import annotations

import json

import pytest

from examples.demos.report import measure_forgetting
from turnwise.default_models.small_model import SmallModelSpec, build_small_model
from turnwise.types import PolicyKind

TINY = [
    SmallModelSpec(hidden_size=32, intermediate_size=64, num_layers=1, num_warm_up_steps=3, seed=seed)
    for seed in (0, 1)
]


def test_a_model_has_forgotten_nothing_of_itself_and_another_model_differs(tmp_path):
    base, other = (build_small_model(tmp_path / str(spec.seed), spec) for spec in TINY)
    lines = tmp_path / "conversations.jsonl"
    messages = [{"role": "user", "content": "Which city?"}, {"role": "assistant", "content": "Oslo it is"}]
    lines.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    same = measure_forgetting(base, base, PolicyKind.FULL, lines)
    assert (same.num_conversations, same.loss_after) == (1, same.loss_before)
    assert same.kl == pytest.approx(0.0, abs=1e-6)
    assert measure_forgetting(base, other, PolicyKind.FULL, lines).kl > 1e-3
