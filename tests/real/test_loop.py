"""The whole loop against a real vLLM: calls become turns, rewards become a version, and agents sample with it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.browser import running_browser, visit
from support.running_trainer import GROUP_SIZE, GROUPS, play_group, running_trainer, wait_for_version
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.client import Client
from turnwise.default_models.trail import make_task

pytestmark = pytest.mark.engine

AGENT = Path(__file__).parents[2] / "examples" / "trail" / "agent.py"
NUM_RATED = 8


def test_rewards_become_a_served_version_and_a_killed_trainer_resumes(engine, start_proxy, tmp_path, base_weights):
    """Two batches with a kill in between: two versions, each group trained once, and each turn has its version."""
    proxy = start_proxy(engine.url)
    log = tmp_path / "trainer.log"
    with Client(proxy.url) as client:
        with running_trainer(proxy, engine.model_dir, tmp_path) as trainer:
            play_group(client, 0)
            play_group(client, 1)
            first = wait_for_version(client, 1, log)
            # Engines get a version before its groups are acknowledged: a kill in between has them trained again.
            wait_until(lambda: list(client.updates()), "the groups are acknowledged")
            os.killpg(trainer.pid, signal.SIGKILL)
            trainer.wait(WAIT_SECONDS)
        play_group(client, 2)
        play_group(client, 3)
        with running_trainer(proxy, engine.model_dir, tmp_path):
            second = wait_for_version(client, 2, log)
        play_group(client, 4)
        experiences = list(client.experiences(merge="chain"))
    print(f"\npaused for {first['reload_seconds'] * 1e3:.0f} and {second['reload_seconds'] * 1e3:.0f} ms")
    versions = {view.turn.session_id[:2]: view.turn.policy_version_first for view in proxy.turns()}
    assert versions == {"g0": 0, "g1": 0, "g2": 1, "g3": 1, "g4": 2}
    assert {view.turn.outcome.value for view in proxy.turns()} == {"exact"}
    assert len(experiences) == 5 * GROUP_SIZE
    served = Path(second["path"])
    assert json.loads((served / "turnwise.json").read_text())["version"] == 2
    assert (served / "model.safetensors").read_bytes() != (engine.model_dir / "model.safetensors").read_bytes()


def test_thumbs_that_a_person_gives_in_a_browser_become_a_served_version(engine, start_proxy, tmp_path, base_weights):
    """Conversations without a group, a reward or a task: only the clicks on the page say which replies were good."""
    proxy = start_proxy(engine.url)
    singles = ("--singles-per-group", str(NUM_RATED // GROUPS))
    with Client(proxy.url) as client, running_browser() as browser, visit(browser, proxy) as window:
        for number in range(NUM_RATED):
            session = client.create_session(session_id=f"chat-{number}")
            asked = [{"role": "user", "content": "Hello."}]
            session.openai().chat.completions.create(model="small", messages=asked, max_completion_tokens=8)
            session.end()
        with running_trainer(proxy, engine.model_dir, tmp_path, *singles):
            for number in range(NUM_RATED):
                page = window.open(f"#session/chat-{number}")
                page.click("summary:text-is('Feedback')")
                page.click(f"button[aria-label='{'Good' if number % 2 else 'Bad'} reply']")
                page.wait_for_selector(f".given:text('reward feedback {number % 2}')")
            served = wait_for_version(client, 1, tmp_path / "trainer.log")
        assert [update["num_sessions"] for update in client.updates()] == [NUM_RATED]
    weights = [directory / "model.safetensors" for directory in (Path(served["path"]), engine.model_dir)]
    assert weights[0].read_bytes() != weights[1].read_bytes()


def test_the_same_agent_runs_against_vllm_itself_and_through_the_proxy(engine, start_proxy, tmp_path):
    proxy = start_proxy(engine.url)
    task = tmp_path / "task.json"
    task.write_text(json.dumps(make_task("eval", 0, seed=0).for_agent()))
    for base_url in (f"{engine.url}/v1", proxy.session_v1("agent")):
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": "none"}
        done = subprocess.run(
            [sys.executable, str(AGENT), str(task)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    turns = [view.turn for view in proxy.turns("agent")]
    assert turns
    assert {turn.outcome.value for turn in turns} == {"exact"}
    assert len({turn.chain_id for turn in turns}) == 1
