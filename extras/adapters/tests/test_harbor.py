"""`harbor run` itself, with an agent and an environment of the test's own: Harbor's come with containers."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.client import Client

ROOT = Path(__file__).parents[3]
HARBOR = ROOT / ".adapters" / "harbor" / "bin" / "harbor"

pytestmark = pytest.mark.skipif(not HARBOR.exists(), reason="run extras/adapters/tests/setup.sh first")

TEST_SCRIPT = """#!/bin/bash
if [ "$(cat "$ROOT/app/answer.txt")" = "four" ]; then echo 1; else echo 0; fi > "$ROOT/logs/verifier/reward.txt"
"""


def write_task(directory: Path) -> Path:
    (directory / "environment").mkdir(parents=True)
    (directory / "tests").mkdir()
    (directory / "environment" / "Dockerfile").write_text("FROM scratch\n")
    (directory / "task.toml").write_text('version = "1.0"\n[task]\nname = "test/adds"\n')
    (directory / "instruction.md").write_text("What is 2 + 2?\n")
    (directory / "tests" / "test.sh").write_text(TEST_SCRIPT)
    return directory


def test_a_job_is_a_group_of_sessions_with_the_verifiers_reward(tmp_path: Path) -> None:
    task = write_task(tmp_path / "adds")
    rules = [{"reply": {"text": "four"}, "count": 1, "contains": "2 + 2"}, {"reply": {"text": "five"}}]
    with (
        running_fake_engine(Script.model_validate({"rules": rules})) as engine,
        running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy,
    ):
        command = [HARBOR, "run", "--path", task, "--jobs-dir", tmp_path / "jobs", "--job-name", "arithmetic"]
        command += ["--agent", "harbor_parts:OneCallAgent", "--env", "harbor_parts:DirectoryEnvironment"]
        command += ["--model", "openai/fake", "--n-attempts", "2", "--n-concurrent", "1", "--quiet", "--yes"]
        command += ["--plugin", "turnwise_adapters.harbor:TurnwisePlugin", "--plugin-kwarg", f"proxy={proxy.url}"]
        places = f"{ROOT}{os.pathsep}{Path(__file__).parent / 'parts'}"
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": places, "DO_NOT_TRACK": "1"}
        done = subprocess.run(
            list(map(str, command)), env=environment, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        with Client(proxy.url) as client:
            sessions = sorted(client.sessions(), key=lambda session: session["run"])
            turns = [list(client.turns(session["session_id"])) for session in sessions]
    assert [session["reward"] for session in sessions] == [1.0, 0.0], done.stdout[-3000:]
    assert {session["status"] for session in sessions} == {"ended"}
    assert len({session["group_id"] for session in sessions}) == 1
    assert {session["group_size"] for session in sessions} == {2}
    assert [[turn["outcome"] for turn in of_session] for of_session in turns] == [["exact"], ["exact"]]
