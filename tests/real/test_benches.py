"""The storage, memory and training benchmarks, scaled down, keep their stated limits."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def run(name: str, *arguments: str) -> str:
    """Run a benchmark, which must keep its limits; return its output."""
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *arguments], capture_output=True, text=True, timeout=600, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_session_of_100_turns_stores_little_more_than_its_new_tokens():
    """At most 2.2 bytes for each new one; whole prompts would take 50.5 times as much, the mean of 1 to 100."""
    printed = run("storage.py", "--sessions", "4")
    assert len(re.findall(r" 50\.5×", printed.replace("  ", " "))) == 4


@pytest.mark.slow
def test_no_query_grows_with_the_data_of_others_up_to_a_million_turns(dialect, database_url):
    """The bench itself fails if one does: tests/unit/store/test_plans.py does the same with small stores of SQLite.

    It counts instructions, and on PostgreSQL the blocks that a query reads.
    """
    flags = ["--url", database_url] if dialect == "postgresql" else []
    printed = run("large_store.py", "--turns", "100000", "1000000", *flags)
    assert "999,768 turns in 30,296 sessions" in printed


@pytest.mark.slow
def test_open_sessions_take_no_more_than_their_share_of_300_megabytes():
    run("memory.py", "--sessions", "2000")


@pytest.mark.slow
def test_merged_sessions_train_faster_than_one_row_a_turn_here_and_in_trl():
    """Sessions of 10 turns: the bench itself checks losses and targets; (10 + 1) / 2 times the tokens, and more."""
    printed = run("training.py", "--turns", "10", "--sessions", "4", "--rounds", "2")
    assert float(re.search(r"row a turn .* ([0-9.]+)× the tokens", printed)[1]) > 5.5
    assert printed.count("TRL, row a") == 2


@pytest.mark.slow
def test_bad_versions_are_rolled_back_under_calls_and_fail_none_of_them():
    """Five poisons: the bench itself fails if one stays served, or a call fails."""
    printed = run("poisoned.py")
    assert len(re.findall(r"\| check before the load \| [0-9.]+ s \| 0 of ", printed)) == 2
    assert printed.count("| canary |") == 2


@pytest.mark.slow
def test_in_a_month_of_traffic_both_hacks_are_named_and_no_call_fails():
    assert run("traffic.py").count("ok ") == 4


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1024, 1])
def test_simulated_agents_get_an_answer_to_every_call(limit):
    """Small prompts and short pauses; the bench itself fails on calls that failed or timed out.

    Calls beyond the limit are refused with `Retry-After`.
    """
    small = [
        "--agents",
        "6",
        "--turns",
        "20",
        "--seconds",
        "120",
        "--warm-up",
        "0",
        "--scale",
        "0.01",
        "--pace",
        "0.02",
    ]
    figures = json.loads(run("agents.py", *small, "--max-concurrent-calls", str(limit), "--json"))
    assert figures["turns"] >= 20
    assert (figures["refused"] > 0) == (limit == 1)


def gpu_check(directory: Path, *arguments: str) -> tuple[int, dict]:
    """Run the small form of `make gpu-check`; return its exit status and its report."""
    argv = [sys.executable, str(BENCH / "gpu_check.py"), "--small", "--out", str(directory), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=1200, check=False)
    print(done.stdout, done.stderr)
    return done.returncode, json.loads((directory / "report.json").read_text())


@pytest.mark.slow
def test_the_gpu_check_names_the_machine_and_continues_after_a_part_that_fails(tmp_path):
    """A directory lies where the first part writes its figures."""
    (tmp_path / "machine.json").mkdir()
    status, report = gpu_check(tmp_path, "--parts", "machine", "kernels")
    assert status == 1
    assert report["is_small"]
    assert report["parts"]["machine"]["status"] == "failed"
    attention = report["parts"]["kernels"]["attention"]
    assert attention["fewer_tokens"] == 1024 / 448  # 4 · (192 + 64) tokens apart, 192 + 4 · 64 in a forest
    printed = (tmp_path / "table.md").read_text()
    assert "| machine | | failed: " in printed
    assert "| kernels | `loss.faster` |" in printed


@pytest.mark.slow
def test_every_part_of_the_gpu_check_gives_figures_with_the_stand_in(tmp_path):
    status, report = gpu_check(tmp_path, "--engine", "fake")
    assert status == 0, report
    assert report["parts"]["publish"]["num_failed_calls"] == 0
    assert report["parts"]["step-1.7b"]["trained_tokens"] == 4 * 10 * 16
