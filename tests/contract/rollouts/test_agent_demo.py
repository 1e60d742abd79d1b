"""How the demos play by `turnwise run`, on a fake engine."""

import asyncio
import json
from pathlib import Path

from examples.demos.agent import AgentDemo, AgentDemoSettings
from examples.demos.report import mean_reward
from turnwise.client import AsyncClient

AGENT = """
import json, urllib.request

def play(task, run):
    body = json.dumps({"model": run.model, "messages": [{"role": "user", "content": task["question"]}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + run.api_key}
    with urllib.request.urlopen(urllib.request.Request(run.base_url + "/chat/completions", body, headers)) as answer:
        json.load(answer)
    return float("after" in run.directory)
"""
"""Solves the tasks that are played after the training."""


def test_the_demo_plays_and_writes_the_same_task_before_and_after(shared_proxy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("an_agent.py").write_text(AGENT)
    Path("out/logs").mkdir(parents=True)
    settings = AgentDemoSettings(agent=Path("an_agent.py"), out=Path("out"), num_eval_tasks=3, max_versions=1)
    demo = AgentDemo(settings, lambda _who, _text: None)
    demo._proxy = shared_proxy.proxy.url
    demo._write_tasks()

    async def play() -> list[float]:
        async with AsyncClient(shared_proxy.proxy.url) as client:
            before, after = (
                await demo._play("before", "eval"),
                await demo._play("after", "eval", "--sampling", '{"temperature": 0}'),
            )
            await demo._write_transcript(client, before, after)
            for results, temperature in ((before, 1.0), (after, 0.0)):
                turns = [turn async for turn in client.turns(results[0].session_id)]
                assert turns[0]["sampling"].get("temperature", 1.0) == temperature
            return [mean_reward(before), mean_reward(after)]

    assert asyncio.run(play()) == [0.0, 1.0]
    transcript = Path("out/transcript.md").read_text()
    assert "## Before: reward 0, 1 turns" in transcript
    assert "## After: reward 1, 1 turns" in transcript
    assert transcript.count("Follow each boss from") == 4, "the fake engine repeats the question"
    played = [json.loads(line) for line in Path("out/rollouts/after/results.jsonl").read_text().splitlines()]
    assert [(each["split"], each["num_turns"]) for each in played] == [("eval", 1)] * 3


def test_held_out_tasks_are_played_only_until_the_interval_is_narrow(shared_proxy, tmp_path, monkeypatch):
    """Of 40 tasks 32 are enough where all rewards are equal: ± 0.06. A thorough run plays all of them."""
    monkeypatch.chdir(tmp_path)
    Path("an_agent.py").write_text(AGENT)
    said: list[str] = []
    for thorough, expected in ((False, 32), (True, 40)):
        out = Path(f"out-{thorough}")
        (out / "logs").mkdir(parents=True)
        settings = AgentDemoSettings(
            agent=Path("an_agent.py"), out=out, num_eval_tasks=40, max_versions=1, thorough=thorough
        )
        demo = AgentDemo(settings, lambda _who, text: said.append(text))
        demo._proxy = shared_proxy.proxy.url
        demo._write_tasks()
        assert len(asyncio.run(demo._held_out("before"))) == expected
    assert said[0] == "held-out reward, before: 0.00 ± 0.06"
