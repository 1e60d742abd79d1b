"""Other projects' own clients against our gateways."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ports import free_port
from support.proxies import RunningProxy, running_proxy
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Script, running_fake_engine, tokens

from turnwise.client import Client
from turnwise.processes.supervisor import is_ready

ROOT = Path(__file__).parents[3]


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[RunningProxy]:
    script = Script.model_validate({"rules": [{"reply": {"text": "four"}}]})
    with (
        running_fake_engine(script) as engine,
        running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy,
    ):
        yield proxy


def python_of(name: str) -> Path:
    python = ROOT / ".adapters" / name / "bin" / "python"
    if not python.exists():
        pytest.skip("run extras/adapters/tests/setup.sh first")
    return python


@contextlib.contextmanager
def gateway(module: str, proxy: RunningProxy) -> Iterator[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", f"turnwise_adapters.{module}", "--proxy", proxy.url, "--port", str(port)]
    process = subprocess.Popen(command, env=os.environ)
    try:
        wait_until(lambda: is_ready(f"{url}/health"), "the gateway answers")
        yield url
    finally:
        process.terminate()
        process.wait(WAIT_SECONDS)


def play(python: Path, program: str, url: str) -> dict:
    client = [str(python), str(Path(__file__).parent / "parts" / program), url]
    done = subprocess.run(client, env={}, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_rllms_client_gets_its_sessions_and_traces(proxy: RunningProxy) -> None:
    python = python_of("rllm")
    with gateway("rllm_gateway", proxy) as url:
        found = play(python, "rllm_client.py", url)
    first, second = found["traces"]
    assert first["prompt_token_ids"] == tokens.encode(tokens.render(first["messages"], None))
    assert first["completion_token_ids"] == tokens.encode("four<|im_end|>")
    assert len(first["logprobs"]) == len(first["completion_token_ids"])
    whole = [*first["prompt_token_ids"], *first["completion_token_ids"]]
    assert second["prompt_token_ids"][: len(whole)] == whole
    assert [trace["metadata"]["outcome"] for trace in found["traces"]] == ["exact", "exact"]
    assert (found["info"]["trace_count"], found["info"]["metadata"]) == (2, {"task": "adds"})
    assert (found["listed"], found["one"], found["workers"]) == (["rollout-1"], first["trace_id"], [])
    assert (found["missing"], found["stream_ended"]) == (404, True)
    assert (found["deleted"], found["left"]) == (2, [])


def test_trinitys_client_rewards_messages_and_commits_them(proxy: RunningProxy) -> None:
    """Each message keeps its own reward, and the conversation is one session of the client's task."""
    python = python_of("trinity")
    with gateway("trinity_explorer", proxy) as url:
        found = play(python, "trinity_client.py", url)
    assert found["alive"] is True
    assert found["first"] == found["second"] == found["commit"] == {"status": "success"}
    assert found["waiting"] == 1
    assert found["metrics"] == {"num_feedbacks": 2, "num_committed_sessions": 1, "num_sessions_to_commit": 0}
    assert "error" in found["wrong"]
    with Client(proxy.url) as client:
        (session,) = client.sessions()
        turns = list(client.turns(session["session_id"]))
        experiences = list(client.experiences(session_id=session["session_id"]))
    assert (session["status"], session["task_id"], session["group_id"]) == ("ended", "adds", "adds")
    assert [turn["turn_id"] for turn in turns] == found["ids"]
    assert [one["session_reward"] for one in experiences] == [1.25, 1.25]
    assert [one["turn_rewards"] for one in experiences] == [[0.25], [1.0]]


def test_areals_client_plays_a_session_with_rewards_for_its_turns(proxy: RunningProxy) -> None:
    """The session key alone identifies the session; a reward without an id is the last turn's."""
    python = python_of("areal")
    with gateway("areal_sessions", proxy) as url:
        found = play(python, "areal_client.py", url)
    with Client(proxy.url) as client:
        (session,) = client.sessions()
        turns = list(client.turns(session["session_id"]))
        experiences = list(client.experiences(session_id=session["session_id"]))
    assert (session["session_id"], session["status"], session["task_id"]) == (found["session_id"], "ended", "adds")
    assert [turn["turn_id"] for turn in turns] == found["ids"]
    assert [turn["outcome"] for turn in turns] == ["exact", "exact"]
    assert [one["turn_rewards"] for one in experiences] == [[0.25], [1.0]]


def test_rewards_of_agent_lightnings_emitter_are_those_of_the_session_and_of_the_linked_turn(
    proxy: RunningProxy,
) -> None:
    program = str(Path(__file__).parent / "parts" / "agent_lightning_agent.py")
    command = [str(python_of("agentlightning")), program, proxy.url, "s"]
    done = subprocess.run(
        command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with Client(proxy.url) as client:
        turns = list(client.turns("s"))
        session = client.session("s")
    lines = [[(line["name"], line["value"]) for line in turn["rewards"]] for turn in turns]
    assert lines == [[("reward", 0.25)], []]
    assert session["reward"] == 1.0
