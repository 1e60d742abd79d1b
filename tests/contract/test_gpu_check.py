"""`make gpu-check` fits its time and reports every part, also those that failed or took too long."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

PROGRAM = Path(__file__).parents[2] / "bench" / "gpu_check.py"


@pytest.fixture
def gpu_check() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_parts_after_a_failed_one_run_and_the_report_has_all_of_them(gpu_check, monkeypatch, tmp_path, capsys):
    """The exit status is 1, and the table gives the reason beside the figures and targets of the others."""

    def run_part(name: str, *_: object) -> dict[str, object]:
        if name == "step-0.6b":
            return {"status": "failed", "reason": "CUDA out of memory"}
        return {"status": "done", "seconds": 1.0, "trained_tokens_per_second": 26000.0, "num_failed_calls": 0}

    monkeypatch.setattr(gpu_check, "run_part", run_part)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--small", "--out", str(tmp_path)])
    assert gpu_check.main() == 1
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["parts"]) == list(gpu_check.PARTS)
    table = (tmp_path / "table.md").read_text()
    assert table in capsys.readouterr().out
    assert "| step-0.6b | | failed: CUDA out of memory | |" in table
    assert "| step-1.7b | `trained_tokens_per_second` | 2.6e+04 | ≥ 25000 |" in table
    assert "| publish | `num_failed_calls` | 0 | ≤ 0 |" in table
