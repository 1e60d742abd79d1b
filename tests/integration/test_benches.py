"""The storage, memory and training benchmarks, scaled down, keep their stated limits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"


def run(name: str, *arguments: str) -> str:
    """Run a benchmark, which must keep its limits; return its output."""
    done = subprocess.run(
        [sys.executable, str(BENCH / name), *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_session_of_100_turns_stores_little_more_than_its_new_tokens():
    """At most 2.2 bytes for each new one; whole prompts would take 50.5 times as much, the mean of 1 to 100."""
    printed = run("storage.py", "--sessions", "4")
    assert len(re.findall(r" 50\.5×", printed.replace("  ", " "))) == 4


@pytest.mark.slow
def test_open_sessions_take_no_more_than_their_share_of_300_megabytes():
    run("memory.py", "--sessions", "2000")


def test_merged_sessions_train_faster_than_one_row_a_turn_here_and_in_trl():
    """Sessions of 10 turns: the bench itself checks losses and targets; (10 + 1) / 2 times the tokens, and more."""
    printed = run("training.py", "--turns", "10", "--sessions", "4", "--rounds", "2")
    assert float(re.search(r"row a turn .* ([0-9.]+)× the tokens", printed)[1]) > 5.5
    assert printed.count("TRL, row a") == 2
