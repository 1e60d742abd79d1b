"""`vf-eval` itself against the proxy, and its rewards as those of the sessions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.client import Client

ROOT = Path(__file__).parents[3]
VF_EVAL = ROOT / ".adapters" / "verifiers" / "bin" / "vf-eval"

pytestmark = pytest.mark.skipif(not VF_EVAL.exists(), reason="run extras/adapters/tests/setup.sh first")


def test_a_run_is_a_group_of_sessions_with_the_environments_rewards(tmp_path: Path) -> None:
    rules = [{"reply": {"text": "four"}, "count": 1, "contains": "2 + 2"}, {"reply": {"text": "five"}}]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PYTHONPATH": str(Path(__file__).parent / "parts"),
    }
    with (
        running_fake_engine(Script.model_validate({"rules": rules})) as engine,
        running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy,
    ):
        command = [VF_EVAL, "adds_task", "--env.agent.harness.id", "adds_task", "--model", "fake"]
        command += ["--env.agent.runtime.type", "subprocess", "--num-rollouts", "2", "--max-concurrent", "1"]
        command += ["--client.base-url", proxy.v1, "--client.api-key-var", "NO_KEY", "--output-dir", tmp_path / "runs"]
        done = subprocess.run(
            [*map(str, command), "--run.dir", "run"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (traces,) = tmp_path.rglob("traces.jsonl")
        adapter = [sys.executable, "-m", "turnwise_adapters.verifiers", str(traces), "--proxy", proxy.url]
        counts = json.loads(
            subprocess.run(adapter, capture_output=True, text=True, timeout=WAIT_SECONDS, check=True).stdout
        )
        with Client(proxy.url) as client:
            sessions = sorted(client.sessions(), key=lambda session: session["run"])
    assert counts == {"sessions": 2, "traces_without_calls": 0, "traces_without_rewards": 0}
    assert sorted(session["reward"] for session in sessions) == [0.0, 2.0]
    assert {(session["status"], session["task_id"], session["group_size"]) for session in sessions} == {
        ("ended", "adds", 2)
    }
    assert len({session["group_id"] for session in sessions}) == 1
