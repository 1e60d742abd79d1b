"""pydantic-ai on the demo's trail, played by `turnwise run --call`: streamed, with a typed tool."""

import asyncio
import json
from pathlib import Path

import pytest
from support.rollout_agents import finished_run, write_tasks
from turnwise_fake_engine import Reply, Rule, ToolCall

from examples.demos.agent import AgentDemo, AgentDemoSettings
from examples.demos.trail_formats import FORMATS
from turnwise.client import Client
from turnwise.default_models import trail

ROOT = Path(__file__).parents[3]
TYPED = FORMATS["typed_trail"]
AGENT = Path("examples/pydantic_ai/trail.py")


def test_each_session_is_one_exact_chain_and_the_model_reads_the_warm_ups_tool_schema(proxy, fake_engine, tmp_path):
    task = TYPED.for_agent(trail.make_task("eval", 0, 0))
    answers = Reply(text=f'The answer is "{task["answer"]}".')
    fake_engine.answer(Rule(reply=answers))
    lookup = ToolCall(name="lookup", arguments={"name": next(iter(task["records"]))})
    fake_engine.answer(Rule(contains="Follow each boss", reply=Reply(tool_calls=[lookup])))
    options = ("--tasks", str(write_tasks(tmp_path, task)), "--out", str(tmp_path / "out"), "--split", "eval", "--json")
    done = finished_run(ROOT, "--url", proxy.url, *options, "--call", "examples.pydantic_ai.trail:play")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["reward"], run["num_turns"]) == (1.0, 2)
    with Client(proxy.url) as client:
        turns = list(client.turns(run["session_id"]))
    assert [turn["outcome"] for turn in turns] == ["exact"] * 2
    assert len({turn["chain_id"] for turn in turns}) == 1
    (tool,) = turns[0]["tools"]
    (expected,) = TYPED.warm_up.tools or ()
    assert {name: tool["function"][name] for name in expected["function"]} == expected["function"]
    assert {turn["sampling"]["temperature"] for turn in turns} == {0}, "held-out tasks are played greedily"


def test_a_call_that_cannot_be_parsed_ends_the_run_without_a_reward_on_one_chain(proxy, fake_engine, tmp_path):
    """In 4,848 sessions of a policy that learnt, one had such a call, and pydantic-ai sent it back changed."""
    fake_engine.answer(Rule(reply=Reply(tool_calls=[ToolCall(name="lookup", arguments='{"name": "')])))
    tasks = write_tasks(tmp_path, TYPED.for_agent(trail.make_task("train", 0, 0)))
    options = ("--tasks", str(tasks), "--out", str(tmp_path / "out"), "--json")
    done = finished_run(ROOT, "--url", proxy.url, *options, "--call", "examples.pydantic_ai.trail:play")
    assert done.returncode == 0, done.stderr
    (run,) = json.loads(done.stdout)["runs"]
    assert (run["reward"], run["num_turns"], run["termination_reason"]) == (0.0, 1, "exit_status_0")


@pytest.mark.engine
@pytest.mark.slow
def test_pydantic_ai_learns_the_trail(tmp_path, monkeypatch):
    """With a real vLLM: from at most 0.25 to at least 0.95 on 256 held-out tasks, every turn exact, no failed call."""
    monkeypatch.chdir(ROOT)
    settings = AgentDemoSettings(agent=AGENT, world="typed_trail", out=tmp_path)
    report = asyncio.run(AgentDemo(settings, lambda who, text: print(f"{who:8s} {text}")).run())
    assert report.reward_before <= 0.25
    assert report.reward_after >= 0.95
    assert (report.failed_requests, report.num_chains_max) == (0, 1)
    assert set(report.outcomes) == {"exact"}
