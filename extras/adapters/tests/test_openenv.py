"""An environment on OpenEnv's own server, played by its own client, as the task of `turnwise run`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.ports import free_port
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.client import Client
from turnwise.processes.supervisor import is_ready

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".adapters" / "openenv" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="run extras/adapters/tests/setup.sh first")


def test_an_environments_rewards_are_those_of_the_steps(tmp_path: Path) -> None:
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    served = [str(PYTHON), str(Path(__file__).parent / "parts" / "counting_environment.py"), str(port)]
    server = subprocess.Popen(served, env={"HOME": str(tmp_path)})
    try:
        wait_until(lambda: is_ready(f"{address}/health"), "the environment answers")
        tasks = tmp_path / "tasks.jsonl"
        task = {"task_id": "adds", "env": address, "observation": "text", "reset": {"seed": 2}}
        tasks.write_text(json.dumps(task | {"instruction": "Answer in one word."}) + "\n")
        rules = [{"reply": {"text": "five"}, "contains": "2 + 2"}, {"reply": {"text": "four"}}]
        with (
            running_fake_engine(Script.model_validate({"rules": rules})) as engine,
            running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy,
        ):
            command = [sys.executable, "-m", "turnwise", "run", "--url", proxy.url, "--tasks", str(tasks)]
            command += [
                "--group-size",
                "2",
                "--credit",
                "step_wise",
                "--parallel",
                "2",
                "--out",
                str(tmp_path / "out"),
                "--python",
                str(PYTHON),
            ]
            command += ["--call", "turnwise_adapters.openenv:play"]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
            )
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            with Client(proxy.url) as client:
                sessions = list(client.sessions())
                experiences = list(client.experiences(session_id=sessions[0]["session_id"]))
    finally:
        server.terminate()
        server.wait(WAIT_SECONDS)
    assert [(each["task_id"], each["status"], each["num_turns"]) for each in sessions] == [("adds", "ended", 2)] * 2
    assert len({each["group_id"] for each in sessions}) == 1
    # The first answer is wrong and the second right.
    assert sorted(one["turn_rewards"] for one in experiences) == [[0.0], [1.0]]
