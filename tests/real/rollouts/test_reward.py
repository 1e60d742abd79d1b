"""`turnwise reward` as a user calls it: sessions of a real proxy get their rewards, each once."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import run_turnwise
from support.proxies import RunningProxy
from support.rollout_agents import write_program
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Reply, Rule

from turnwise.client import Client
from turnwise.processes.stack import command


@pytest.fixture
def client(proxy: RunningProxy) -> Iterator[Client]:
    with Client(proxy.url) as client:
        yield client


def play(client: Client, session_id: str, *user_texts: str, **fields: object) -> None:
    session = client.create_session(session_id=session_id, **fields)
    messages: list[dict[str, object]] = []
    for text in user_texts:
        messages.append({"role": "user", "content": text})
        reply = session.openai().chat.completions.create(model="fake", messages=messages)
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    session.end()


def start(directory: Path, proxy: RunningProxy, *arguments: str) -> subprocess.Popen[str]:
    argv = command("reward", "--url", proxy.url, *arguments)
    return subprocess.Popen(argv, cwd=directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finished(directory: Path, proxy: RunningProxy, *arguments: str) -> tuple[int, dict[str, object], str]:
    """Run `turnwise reward` to its end; return its exit status, its counts and its output."""
    done = run_turnwise("reward", "--url", proxy.url, "--json", *arguments, cwd=directory, seconds=WAIT_SECONDS)
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def test_a_command_rewards_every_ended_session_once(proxy, client, tmp_path):
    """A second run writes no reward, with or without the state file: the proxy already stores the rewards."""
    for number in range(3):
        play(client, f"s{number}", f"say {number}")
    client.create_session(session_id="open")
    grader = "import json, sys\nprint(int(json.load(sys.stdin)['chains'][0]['messages'][-1]['content'][-1]))\n"
    write_program(tmp_path / "grade.py", f"#!{sys.executable}\n{grader}")
    arguments = ("--source", "command", "--command", "./grade.py")
    status, counts, stderr = finished(tmp_path, proxy, *arguments)
    assert (status, counts["num_sessions"], counts["num_rewards"], counts["value_sum"]) == (0, 3, 3, 3.0), stderr
    assert {s["session_id"]: s["reward"] for s in client.sessions()} == {"s0": 0, "s1": 1, "s2": 2, "open": None}
    assert finished(tmp_path, proxy, *arguments)[1]["num_sessions"] == 0
    (state,) = tmp_path.glob("runs/reward-command-reward.jsonl")
    state.unlink()
    assert finished(tmp_path, proxy, *arguments)[0] == 0
    rewards = client.turn(next(client.turns("s2"))["turn_id"])["rewards"]
    assert client.session("s2")["reward"] == 2
    assert rewards == []


def test_a_python_function_may_reward_single_turns(proxy, client, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def grade(session):\n"
        "    return [{'turn_id': t['turn_id'], 'value': len(t['messages'][-1]['content'])} for t in session['turns']]\n"
    )
    play(client, "s0", "a", "bcd")
    status, _, stderr = finished(tmp_path, proxy, "--source", "python", "--function", "mine:grade")
    assert status == 0, stderr
    assert [[line["value"] for line in turn["rewards"]] for turn in client.turns("s0")] == [[1.0], [3.0]]


def test_a_source_that_fails_is_retried_and_then_skipped(proxy, client, tmp_path):
    (tmp_path / "mine.py").write_text(
        "tried = []\n"
        "def grade(session):\n"
        "    name = session['session']['session_id']\n"
        "    tried.append(name)\n"
        "    if name == 'bad' or tried.count(name) < 2:\n"
        "        raise ValueError('not yet')\n"
        "    return 1\n"
    )
    play(client, "good", "a")
    play(client, "bad", "a")
    arguments = ("--source", "python", "--function", "mine:grade", "--attempts", "2")
    status, counts, stderr = finished(tmp_path, proxy, *arguments)
    assert status == 1
    assert (counts["num_rewards"], counts["num_failed"], counts["num_retries"]) == (1, 1, 2)
    assert "session bad: mine:grade failed: ValueError: not yet" in stderr
    assert (client.session("good")["reward"], client.session("bad")["reward"]) == (1.0, None)


def test_a_function_that_never_returns_fails_at_its_time_limit_and_does_not_keep_the_process(proxy, client, tmp_path):
    (tmp_path / "mine.py").write_text("import threading\ndef grade(session):\n    threading.Event().wait()\n")
    play(client, "s0", "a")
    limits = ("--timeout", "0.1", "--votes", "1", "--attempts", "1")
    status, counts, _ = finished(tmp_path, proxy, "--source", "python", "--function", "mine:grade", *limits)
    assert (status, counts["num_failed"]) == (1, 1)


def test_a_reward_that_the_proxy_refuses_leaves_its_session_alone_without_one(proxy, client, tmp_path):
    """Here the grader makes up a turn and a name; the process goes on, or it would end there after each start."""
    (tmp_path / "mine.py").write_text(
        "def grade(session):\n"
        "    name = session['session']['session_id']\n"
        "    wrong = {'unknown': {'turn_id': 'made-up', 'value': 1}, 'invalid': {'name': 'x' * 9999, 'value': 1}}\n"
        "    return wrong.get(name, 1)\n"
    )
    for name in ("good", "unknown", "invalid"):
        play(client, name, "a")
    status, counts, stderr = finished(tmp_path, proxy, "--source", "python", "--function", "mine:grade")
    assert (status, counts["num_rewards"], counts["num_failed"]) == (1, 1, 2), stderr
    assert [client.session(name)["reward"] for name in ("good", "unknown", "invalid")] == [1.0, None, None]


KILLED_AT = """
import os, signal, sys
from turnwise.client import AsyncClient
from turnwise.commands.cli import main
from turnwise.rewards.posting import Poster
owner, name = {"before the post": (AsyncClient, "rewards"), "after the post": (Poster, "_record")}[sys.argv.pop(1)]
setattr(owner, name, lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
main()
"""
"""`turnwise`, killed at a point of a verdict."""


@pytest.mark.parametrize(("point", "stands"), [("before the post", 2.0), ("after the post", 1.0)])
def test_a_kill_between_verdict_post_and_state_file_gives_the_session_one_reward(
    proxy, client, tmp_path, point, stands
):
    """The grader decides otherwise the second time; it is not asked again about a session that has its reward."""
    (tmp_path / "mine.py").write_text(
        "import pathlib\n"
        "def grade(session):\n"
        "    asked = pathlib.Path('asked')\n"
        "    asked.write_text((asked.read_text() if asked.exists() else '') + 'x')\n"
        "    return len(asked.read_text())\n"
    )
    play(client, "s0", "a")
    arguments = ("--source", "python", "--function", "mine:grade")
    argv = [sys.executable, "-c", KILLED_AT, point, "reward", "--url", proxy.url, *arguments]
    killed = subprocess.run(argv, check=False, cwd=tmp_path, capture_output=True, timeout=WAIT_SECONDS)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert client.session("s0")["reward"] == (1.0 if point == "after the post" else None)
    assert finished(tmp_path, proxy, *arguments)[0] == 0
    assert client.session("s0")["reward"] == stands
    assert finished(tmp_path, proxy, *arguments)[1]["num_sessions"] == 0
    assert (tmp_path / "asked").read_text() == ("x" if point == "after the post" else "xx")


def test_a_judge_scores_each_session_by_the_rubric_and_is_not_trained_on(proxy, client, fake_engine, tmp_path):
    """The served model judges; two votes of 8 and 6 make 0.7; its own calls are in an eval session."""
    play(client, "s0", "hello")
    fake_engine.answer(Rule(contains="Is it polite?", reply=Reply(text='{"number": 1, "score": 8}'), count=1))
    fake_engine.state.script.rules.append(Rule(contains="Is it polite?", reply=Reply(text='{"score": 6}')))
    status, _, stderr = finished(tmp_path, proxy, "--source", "judge", "--rubric", "Is it polite?", "--votes", "2")
    assert status == 0, stderr
    assert client.session("s0")["reward"] == pytest.approx(0.7)
    (judging,) = [s for s in client.sessions() if s["metadata"].get("source") == "judge"]
    assert judging["split"] == "eval"


def test_a_relative_judge_compares_a_group_in_both_orders(proxy, client, fake_engine, tmp_path):
    """A judge that always prefers the first place gives both sessions the mean: (9 + 1) / 2 tenths."""
    for run in range(2):
        play(client, f"s{run}", f"hello {run}", group_id="g", group_size=2, run=run)
    play(client, "alone", "hello", group_id="unfinished", group_size=2)
    biased = Reply(text='{"number": 1, "score": 9}\n{"number": 2, "score": 1}')
    fake_engine.answer(Rule(contains="Compare them", reply=biased))
    status, counts, stderr = finished(tmp_path, proxy, "--source", "judge", "--relative", "--votes", "2")
    assert (status, counts["num_sessions"]) == (0, 2), stderr
    assert [client.session(f"s{run}")["reward"] for run in range(2)] == [0.5, 0.5]
    prompts = [c.body["messages"][0]["content"] for c in fake_engine.calls if "Compare" in str(c.body)]
    assert len(prompts) == 2
    assert prompts[0].index("hello 0") < prompts[0].index("hello 1") or prompts[1].index("hello 0") < prompts[1].index(
        "hello 1"
    )
    assert (prompts[0].index("hello 0") < prompts[0].index("hello 1")) != (
        prompts[1].index("hello 0") < prompts[1].index("hello 1")
    )


def test_a_judge_that_disagrees_with_known_outcomes_posts_nothing_and_kept_answers_are_not_asked_for_again(
    proxy, client, fake_engine, tmp_path
):
    """It prefers `bad` to `good`. With the outcomes swapped it agrees, on the kept answers, and rewards all three."""
    for name in ("good", "bad", "new"):
        play(client, name, f"this is {name}")
    for name, score in (("good", 2), ("bad", 9), ("new", 5)):
        fake_engine.answer(Rule(contains=f"this is {name}", reply=Reply(text=f'{{"score": {score}}}')))
    known = tmp_path / "known.jsonl"
    known.write_text('{"session_id": "good", "reward": 1}\n{"session_id": "bad", "reward": 0}\n')
    arguments = ("--source", "judge", "--votes", "1", "--check", "known.jsonl", "--judge-cache", "answers.jsonl")
    status, _, stderr = finished(tmp_path, proxy, *arguments)
    assert status == 1
    assert "agrees with 0% of 1 pairs of 2 checked sessions; at least 70% are required" in stderr
    assert client.session("bad")["reward"] is None
    known.write_text('{"session_id": "good", "reward": 0}\n{"session_id": "bad", "reward": 1}\n')
    num_calls = len(fake_engine.calls)
    status, counts, stderr = finished(tmp_path, proxy, *arguments)
    assert (status, counts["num_sessions"]) == (0, 3), stderr
    assert "agrees with 100% of 1 pairs" in stderr
    assert [client.session(name)["reward"] for name in ("good", "bad", "new")] == [0.2, 0.9, 0.5]
    assert len(fake_engine.calls) == num_calls + 1, "only the new session is judged"


def test_watch_rewards_later_sessions_and_a_kill_neither_loses_nor_duplicates_a_reward(proxy, client, tmp_path):
    write_program(tmp_path / "grade.sh", "#!/bin/sh\necho x >> graded\necho 1\n")
    arguments = ("--source", "command", "--command", "./grade.sh", "--watch")
    play(client, "s0", "a")
    process = start(tmp_path, proxy, *arguments)
    wait_for_reward(client, "s0")
    process.kill()
    process.communicate()
    play(client, "s1", "a")
    process = start(tmp_path, proxy, *arguments)
    wait_for_reward(client, "s1")
    play(client, "s2", "a")
    wait_for_reward(client, "s2")
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    state = (tmp_path / "runs/reward-command-reward.jsonl").read_text()
    assert {json.loads(line)["session_id"] for line in state.splitlines()} - {"s0"} == {"s1", "s2"}
    assert (tmp_path / "graded").read_text().count("x") == 3, "a session that has its reward is not graded again"


def wait_for_reward(client: Client, session_id: str) -> None:
    wait_until(lambda: client.session(session_id)["reward"] is not None, f"{session_id} has a reward")
