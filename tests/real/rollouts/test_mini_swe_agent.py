"""mini-swe-agent itself, played by `turnwise run --call` against the fake engine: every session is one exact chain."""

import json
import os
import pwd
import stat
from pathlib import Path

import pytest
from support.rollout_agents import finished_run
from turnwise_fake_engine import Reply, Rule

from examples.demos.trail_formats import FORMATS, SUBMIT
from turnwise.client import Client
from turnwise.default_models import trail

ROOT = Path(__file__).parents[3]
PYTHON = Path(os.environ.get("TURNWISE_TEST_DEMO_AGENT", ROOT / ".demo-agent")) / "bin/python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="mini-swe-agent is not installed: run `make demo-agent`")


def test_each_session_is_one_exact_chain_and_commands_get_only_the_variables_that_they_need(
    proxy, fake_engine, tmp_path, monkeypatch
):
    monkeypatch.setenv("A_SECRET", "hunter2")
    task = FORMATS["shell_trail"].for_agent(trail.make_task("eval", 0, 0))
    (tmp_path / "tasks.jsonl").write_text(json.dumps(task) + "\n")
    first = next(iter(task["files"]))
    commands = [f"cat {first}", "echo $A_SECRET $PATH; ls -ln; id", f"{SUBMIT}{task['answer']}"]
    for command in reversed(commands):
        fake_engine.answer(Rule(reply=Reply(text=f"```mswea_bash_command\n{command}\n```"), count=1))
    # Each rule answers once; the rule that was inserted last answers first.
    agent = ("--call", "examples.mini_swe_agent.agent:play", "--python", str(PYTHON))
    task_file = ("--tasks", str(tmp_path / "tasks.jsonl"), "--out", str(tmp_path / "out"), "--split", "eval", "--json")
    done = finished_run(ROOT, "--url", proxy.url, *task_file, *agent)
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["reward"], run["num_turns"]) == (1.0, 3)
    with Client(proxy.url) as client:
        turns = list(client.turns(run["session_id"]))
    assert [turn["outcome"] for turn in turns] == ["exact"] * 3
    assert len({turn["chain_id"] for turn in turns}) == 1
    card, listed = (turn["messages"][-1]["content"] for turn in turns[1:])
    assert task["files"][first] in card
    assert "hunter2" not in listed
    assert "/usr/bin" not in listed
    assert first in listed
    assert "<returncode>127</returncode>" in listed, "`id` is not among the commands"
    assert f" {expected_user_id()} " in listed, "the agent and its commands do not run as root"
    assert {turn["sampling"]["temperature"] for turn in turns} == {0}, "held-out tasks are played greedily"


def expected_user_id() -> int:
    """Return the user of sampled commands: `nobody` if this process is root and `nobody` can read the agent."""
    readable = all(parent.stat().st_mode & stat.S_IXOTH for parent in PYTHON.absolute().parents)
    return pwd.getpwnam("nobody").pw_uid if os.geteuid() == 0 and readable else os.geteuid()
