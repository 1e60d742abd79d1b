"""The parts of `make demo-agent` around the agent, on a fake engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from support.proxies import ProxyAndEngine

from turnwise.client import AsyncClient
from turnwise.demo.agent_driver import NUM_TRANSCRIPT_TASKS, AgentDemo, AgentDemoSettings
from turnwise.demo.report import Report

AGENT = """
import json, urllib.request

def play(task, run):
    body = json.dumps({"model": run.model, "messages": [{"role": "user", "content": task["question"]}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + run.api_key}
    with urllib.request.urlopen(urllib.request.Request(run.base_url + "/chat/completions", body, headers)) as answer:
        json.load(answer)
    return float(run.session_id.split("-")[3] == "1")
"""
"""Solves the transcript tasks of pass 1 and no others."""


class ShortDemo(AgentDemo):
    """A short demo: one group and one evaluation in place of the training."""

    async def _play_until_learnt_by(self, rollouts) -> Report:
        await rollouts.train_group(0, 2)
        report = Report(title="A demo", seed=0, reward_before=await rollouts.evaluate(0, 3))
        rollouts.is_training = False
        await rollouts.train_group(1, 2)
        return report


def test_the_demo_plays_trains_stops_and_writes_the_same_task_before_and_after(
    shared_proxy: ProxyAndEngine, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("an_agent.py").write_text(AGENT)
    settings = AgentDemoSettings(agent=Path("an_agent.py"), out=Path("out"), parallel=4)
    demo = ShortDemo(settings, lambda _who, _text: None)

    async def learn(_self, _client, rollouts):
        return await demo._play_until_learnt_by(rollouts)

    monkeypatch.setattr("turnwise.demo.driver.Demo._play_until_learnt", learn)

    async def play() -> tuple[Report, int]:
        async with AsyncClient(shared_proxy.proxy.url) as client, demo._rollouts(client) as rollouts:
            report = await demo._play_until_learnt(client, rollouts)
            return report, rollouts.tally.num_sessions

    report, num_sessions = asyncio.run(play())
    assert report.num_chains_max == 1
    assert num_sessions == 2 + 3 + 2 * NUM_TRANSCRIPT_TASKS, "the stopped group is not played"
    transcript = Path("out/transcript.md").read_text()
    assert "## Before: reward 0, 1 turns" in transcript
    assert "## After: reward 1, 1 turns" in transcript
    assert transcript.count("Follow each boss from") == 4, "the fake engine repeats the question"
    lines = Path("out/rollouts/results.jsonl").read_text().splitlines()
    assert {json.loads(line)["termination_reason"] for line in lines} == {"exit_status_0"}
