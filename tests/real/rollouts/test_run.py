"""`turnwise run` as a user calls it: a process, a real proxy, and agents that are separate programs."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from support.proxies import ProxyAndEngine, command_line
from support.rollout_agents import finished_run, start_run, write_agent, write_program, write_tasks
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.client import Client
from turnwise.rollouts import RunSettings, Task, opened
from turnwise.types import Json


@pytest.fixture
def url(shared_proxy: ProxyAndEngine) -> str:
    return shared_proxy.proxy.url


@pytest.fixture
def client(url: str):
    with Client(url) as client:
        yield client


def sessions_of(client: Client, directory: Path, out: str) -> list[Json]:
    name = json.loads((directory / out / "plan.json").read_text())["name"]
    return [session for session in client.sessions() if session["metadata"].get("rollouts") == name]


def test_one_command_runs_in_its_own_session_and_its_exit_status_is_returned(url, client, tmp_path):
    agent = write_agent(tmp_path, "print(ask('hello'))\nsys.exit(3)\n")
    done = finished_run(tmp_path, "--url", url, "--", sys.executable, str(agent))
    assert (done.returncode, done.stdout) == (3, "hello\n")
    session_id = done.stderr.split("session ")[1].split(",")[0]
    session = client.session(session_id)
    assert (session["status"], session["termination_reason"]) == ("ended", "exit_status_3")
    assert (session["num_turns"], session["reward"]) == (1, None)
    turns = list(client.turns(session_id))
    assert [turn["outcome"] for turn in turns] == ["exact"]


def test_a_term_signal_reaches_the_command_and_its_session_is_ended(url, client, tmp_path):
    agent = write_agent(tmp_path, "ask('hello')\nopen('asked', 'w').close()\nimport time\ntime.sleep(600)\n")
    process = start_run(tmp_path, "--url", url, "--", sys.executable, str(agent))
    wait_until((tmp_path / "asked").exists, "the agent has called")
    os.kill(process.pid, signal.SIGTERM)
    _, output = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 128 + signal.SIGTERM
    session = client.session(output.split("session ")[1].split(",")[0])
    assert (session["status"], session["termination_reason"]) == ("ended", "exit_status_143")


def test_one_command_can_be_graded_and_limited(url, client, tmp_path):
    agent = write_agent(tmp_path, "ask('hello')\nimport time\ntime.sleep(600)\n")
    grader = write_program(tmp_path / "grade.sh", "#!/bin/sh\nexit 1\n")
    options = ("--reward-command", "./grade.sh", "--timeout", "5", "--json")
    done = finished_run(tmp_path, "--url", url, *options, "--", sys.executable, str(agent))
    assert grader.exists()
    assert done.returncode == 124
    result = json.loads(done.stdout)
    assert (result["reward"], result["termination_reason"]) == (0.0, "timeout")


def test_every_run_of_a_task_gets_a_fresh_copy_its_variables_and_a_reward(url, client, tmp_path):
    """Two tasks twice: the agent writes into its copy, the grader compares it with the task's answer."""
    template = tmp_path / "template"
    template.mkdir()
    (template / "notes.txt").write_text("fresh")
    body = """
assert open("notes.txt").read() == "fresh", "the copy is not fresh"
assert os.environ["HOME"].startswith(os.path.dirname(os.getcwd())), "the home is not the run's own"
open("notes.txt", "w").write(ask(sys.argv[1]))
open("run.txt", "w").write(os.environ["TURNWISE_RUN"])
"""
    agent = write_agent(tmp_path, body)
    write_program(
        tmp_path / "grade.sh", '#!/bin/sh\n[ "$(cat notes.txt)" = "$TURNWISE_TASK_ANSWER" ] && echo 1 || echo 0.5\n'
    )
    tasks = write_tasks(
        tmp_path,
        {"task_id": "say yes", "question": "yes", "answer": "yes"},
        {"task_id": "say no", "question": "no", "answer": "maybe"},
    )
    options = ("--tasks", str(tasks), "--group-size", "2", "--parallel", "3", "--workdir", "template")
    graded = ("--reward-command", "./grade.sh", "--out", "out", "--json")
    done = finished_run(tmp_path, "--url", url, *options, *graded, "--", sys.executable, str(agent), "{question}")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    rewards = {(run["task_id"], run["run"]): run["reward"] for run in report["runs"]}
    assert rewards == {("say yes", 0): 1.0, ("say yes", 1): 1.0, ("say no", 0): 0.5, ("say no", 1): 0.5}
    assert (report["summary"]["reward_mean"], report["summary"]["num_turns"]) == (0.75, 4)
    assert "4/4 runs  reward 0.750" in done.stderr
    assert (template / "notes.txt").read_text() == "fresh"
    sessions = sessions_of(client, tmp_path, "out")
    assert {session["status"] for session in sessions} == {"ended"}
    assert {(session["task_id"], session["run"], session["reward"]) for session in sessions} == {
        (task_id, run, reward) for (task_id, run), reward in rewards.items()
    }
    assert len({session["group_id"] for session in sessions}) == 2
    assert {session["group_size"] for session in sessions} == {2}
    assert not list(tmp_path.glob("out/runs/*/work")), "copies of finished runs are removed"


def test_a_grader_reads_the_session_and_rewards_its_steps(url, client, tmp_path):
    agent = write_agent(tmp_path, "ask('one')\nask('two')\n")
    write_program(
        tmp_path / "grade.py",
        f"#!{sys.executable}\nimport json, sys\ntold = json.load(sys.stdin)\n"
        "assert told['task']['task_id'] == 't'\n"
        "for turn in told['turns']:\n"
        "    value = float(turn['response']['content'] == 'two')\n"
        "    print(json.dumps({'value': value, 'step': turn['step'], 'name': 'said two'}))\n",
    )
    tasks = write_tasks(tmp_path, {"task_id": "t"})
    options = ("--tasks", str(tasks), "--reward-command", "./grade.py", "--credit", "step_wise", "--out", "out")
    done = finished_run(tmp_path, "--url", url, *options, "--", sys.executable, str(agent))
    assert done.returncode == 0, done.stderr
    (session,) = sessions_of(client, tmp_path, "out")
    rewards = [[reward["value"] for reward in turn["rewards"]] for turn in client.turns(session["session_id"])]
    assert rewards == [[0.0], [1.0]]


LIMITS = ("6", "60", "300")
"""Seconds: the next one is tried where a busy machine did not come as far within the one before."""


def test_the_time_limit_ends_the_whole_process_tree(url, client, tmp_path):
    """This includes a process that left its process group and its parent."""
    body = """
import subprocess, time
ask('hello')
child = subprocess.Popen(["setsid", "sh", "-c", "sleep 611 & echo $! > orphan.pid; wait"])
time.sleep(600)
"""
    agent = write_agent(tmp_path, body)
    tasks = write_tasks(tmp_path, {"task_id": "t"})
    for limit in LIMITS:
        options = ("--tasks", str(tasks), "--timeout", limit, "--keep-workdirs", "--out", f"out{limit}", "--json")
        done = finished_run(tmp_path, "--url", url, *options, "--", sys.executable, str(agent))
        (run,) = json.loads(done.stdout)["runs"]
        pid_files = [path for path in tmp_path.glob(f"out{limit}/runs/*/work/orphan.pid") if path.read_text()]
        if pid_files:
            break
    assert (run["termination_reason"], run["num_turns"]) == ("timeout", 1)
    orphan = int(pid_files[0].read_text())
    wait_until(lambda: b"611" not in command_line(orphan), "the process that left its parent has ended")


def test_an_interrupt_before_the_last_run_ends_with_130_and_says_how_many_are_played(url, client, tmp_path):
    body = """
import time
ask('hello')
while not os.path.exists("../../../../go"):
    time.sleep(0.02)
"""
    agent = write_agent(tmp_path, body)
    tasks = write_tasks(tmp_path, *({"task_id": name} for name in "abc"))
    options = ("--tasks", str(tasks), "--parallel", "1", "--out", "out", "--json")
    process = start_run(tmp_path, "--url", url, *options, "--", sys.executable, str(agent))
    wait_until((tmp_path / "out/plan.json").exists, "the run has started")
    wait_until(
        lambda: any(session["num_turns"] for session in sessions_of(client, tmp_path, "out")), "a run has made a call"
    )
    os.kill(process.pid, signal.SIGINT)
    assert "stopping" in process.stderr.readline()
    (tmp_path / "go").touch()
    out, error = process.communicate(timeout=WAIT_SECONDS)
    assert (process.returncode, json.loads(out)["summary"]["num_runs"]) == (130, 1), error
    assert "1 of 3 runs are played" in error


def test_after_kill_9_the_same_command_finishes_without_repeating_a_finished_run(url, client, tmp_path):
    """Finished runs are kept, the interrupted one is played in a new session, and no process is left behind."""
    body = """
import time
ask('hello')
open(f"../../../../played-{os.environ['TURNWISE_TASK_ID']}", "a").write(f"{os.getpid()}\\n")
while os.environ["TURNWISE_TASK_ID"] == "slow" and not os.path.exists("../../../../go"):
    time.sleep(0.02)
ask('bye')
"""
    agent = write_agent(tmp_path, body)
    write_program(tmp_path / "grade.sh", "#!/bin/sh\necho x >> ../../../../graded\necho 1\n")
    tasks = write_tasks(tmp_path, {"task_id": "quick"}, {"task_id": "slow"}, {"task_id": "later"})
    options = ("--tasks", str(tasks), "--parallel", "2", "--reward-command", "./grade.sh", "--out", "out", "--json")
    arguments = ("--url", url, *options, "--", sys.executable, str(agent))
    process = start_run(tmp_path, *arguments)
    results = tmp_path / "out/results.jsonl"
    wait_until(lambda: results.exists() and results.read_text().count("\n") == 2, "two runs have finished")
    slow = tmp_path / "played-slow"
    wait_until(lambda: slow.exists() and slow.read_text().endswith("\n"), "the slow run writes")
    process.kill()
    process.communicate()
    interrupted = int(slow.read_text())
    wait_until(lambda: not command_line(interrupted), "the interrupted agent has ended")
    (tmp_path / "go").touch()
    done = finished_run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr
    assert [run["reward"] for run in json.loads(done.stdout)["runs"]] == [1.0, 1.0, 1.0]
    played = {name: (tmp_path / f"played-{name}").read_text().count("\n") for name in ("quick", "slow", "later")}
    assert played == {"quick": 1, "slow": 2, "later": 1}
    assert (tmp_path / "graded").read_text().count("x") == 3
    ended = {(s["task_id"], s["termination_reason"], s["reward"]) for s in sessions_of(client, tmp_path, "out")}
    assert ended == {
        ("quick", "exit_status_0", 1.0),
        ("slow", "interrupted", None),
        ("slow", "exit_status_0", 1.0),
        ("later", "exit_status_0", 1.0),
    }


def test_after_a_kill_a_run_that_was_played_but_not_graded_is_only_graded(url, client, tmp_path):
    agent = write_agent(tmp_path, "ask('hello')\nopen('../../../../played', 'a').write('x')\n")
    write_program(
        tmp_path / "grade.sh", "#!/bin/sh\necho $$ >> ../../../../grading\n[ -e ../../../../go ] || sleep 600\n"
    )
    tasks = write_tasks(tmp_path, {"task_id": "t"})
    options = ("--tasks", str(tasks), "--reward-command", "./grade.sh", "--out", "out", "--json")
    arguments = ("--url", url, *options, "--", sys.executable, str(agent))
    process = start_run(tmp_path, *arguments)
    wait_until((tmp_path / "grading").exists, "the grader runs")
    process.kill()
    process.communicate()
    (tmp_path / "go").touch()
    done = finished_run(tmp_path, *arguments)
    assert [run["reward"] for run in json.loads(done.stdout)["runs"]] == [1.0]
    assert (tmp_path / "played").read_text() == "x"
    assert len(sessions_of(client, tmp_path, "out")) == 1


def test_a_run_whose_line_was_lost_is_read_from_its_session(url, tmp_path):
    """The kill may come between the end of the session and the line in the results."""
    agent = write_agent(tmp_path, "ask('hello')\nopen('../../../../played', 'a').write('x')\n")
    tasks = write_tasks(tmp_path, {"task_id": "t"})
    options = ("--tasks", str(tasks), "--reward-command", "true", "--out", "out", "--json")
    arguments = ("--url", url, *options, "--", sys.executable, str(agent))
    assert finished_run(tmp_path, *arguments).returncode == 0
    (tmp_path / "out/results.jsonl").write_text("")
    (run,) = json.loads(finished_run(tmp_path, *arguments).stdout)["runs"]
    assert (run["reward"], run["num_turns"], run["termination_reason"]) == (1.0, 1, "exit_status_0")
    assert (tmp_path / "played").read_text() == "x"


REWARDS_ITSELF = """
ask("hello")
line = {"session_id": os.environ["TURNWISE_SESSION_ID"], "value": 9.0, "name": "bonus", "source": "turnwise run"}
line |= {"step": 0} if os.environ["TURNWISE_TASK_ID"] == "step" else {}
url = os.environ["OPENAI_BASE_URL"].partition("/sessions/")[0] + "/v1/rewards"
body, headers = json.dumps(line).encode(), {"Content-Type": "application/json"}
urllib.request.urlopen(urllib.request.Request(url, body, headers)).close()
"""


@pytest.mark.parametrize("grader", [("--reward-command", "true"), ()], ids=["graded", "not_graded"])
def test_a_session_that_its_agent_has_rewarded_gets_no_reward_and_is_reported_and_not_trained(
    url, client, tmp_path, grader
):
    """A proxy that was started alone takes rewards of every caller, also under the name of this command."""
    agent = write_agent(tmp_path, REWARDS_ITSELF)
    tasks = write_tasks(tmp_path, {"task_id": "session"}, {"task_id": "step"})
    arguments = ("--url", url, "--tasks", str(tasks), *grader, "--out", "out", "--json")
    for _ in range(2):  # a result whose line was lost is read from its session
        done = finished_run(tmp_path, *arguments, "--", sys.executable, str(agent))
        runs = json.loads(done.stdout)["runs"]
        assert [(run["reward"], run["termination_reason"]) for run in runs] == [(None, "foreign_rewards")] * 2
        (tmp_path / "out/results.jsonl").write_text("")
    stored = sessions_of(client, tmp_path, "out")
    assert [(each["status"], each["train"]) for each in stored] == [("ended", False)] * 2


def test_what_an_agent_writes_beside_its_directory_is_no_reward(url, tmp_path):
    """`../played.json` is what a killed run goes on from; a command has no rewards in it."""
    forged = {"termination_reason": "exit_status_0", "seconds": 0.0, "rewards": [{"value": 9.0}], "error": None}
    agent = write_agent(
        tmp_path,
        f"ask('hello')\nopen('../played.json', 'w').write({json.dumps(forged)!r})\n"
        "open('../../../../forged', 'w').close()\nimport time\ntime.sleep(600)\n",
    )
    tasks = write_tasks(tmp_path, {"task_id": "t"})
    arguments = ("--url", url, "--tasks", str(tasks), "--out", "out", "--json", "--", sys.executable, str(agent))
    process = start_run(tmp_path, *arguments)
    wait_until((tmp_path / "forged").exists, "the agent has written")
    process.kill()
    process.communicate()
    (run,) = json.loads(finished_run(tmp_path, *arguments).stdout)["runs"]
    assert (run["reward"], run["num_turns"]) == (None, 1)


WRITES_ANSWERS = """
import json, subprocess, sys, urllib.request

FORGE = '''
import json, os
parent = f"/proc/{os.getppid()}/fd"
lines = [{"id": n, "value": 9.0} for n in range(9)] + [{"id": "x", "value": 9.0}, [1], 5]
for name in os.listdir(parent):
    if os.readlink(f"{parent}/{name}").startswith("pipe:"):
        try:
            with open(os.open(f"{parent}/{name}", os.O_WRONLY | os.O_NONBLOCK), "w") as pipe:
                pipe.write(chr(10).join(["no JSON", *map(json.dumps, lines), ""]))
        except OSError:
            pass
'''

def play(task, run):
    body = json.dumps({"model": run.model, "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + run.api_key}
    urllib.request.urlopen(urllib.request.Request(run.base_url + "/chat/completions", body, headers)).close()
    subprocess.run([sys.executable, "-c", FORGE], check=True)
    return 0.25
"""


def test_a_program_of_the_agent_answers_no_run(url, tmp_path):
    """By `/proc` it finds the pipe of its worker's answers; its lines are refused, and reported."""
    (tmp_path / "forging_agent.py").write_text(WRITES_ANSWERS)
    tasks = write_tasks(tmp_path, *({"task_id": str(number)} for number in range(3)))
    options = ("--tasks", str(tasks), "--call", "forging_agent:play", "--parallel", "1")
    done = finished_run(tmp_path, "--url", url, *options, "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    assert [run["reward"] for run in json.loads(done.stdout)["runs"]] == [0.25] * 3
    assert "a line that answers no run is refused" in done.stderr


async def test_a_library_plays_tasks_and_held_out_tasks_side_by_side(url, tmp_path, monkeypatch):
    (tmp_path / "library_agent.py").write_text(CALLED)
    monkeypatch.chdir(tmp_path)
    settings = RunSettings(url=url, call="library_agent:play", tasks=Path("none"), parallel=4, out=tmp_path / "out")
    tasks = [Task(str(n), {"question": str(n), "answer": "1"}) for n in range(3)]
    async with opened(settings) as runner:
        trained, held_out = await asyncio.gather(runner.play(tasks, group_size=2), runner.play(tasks, split="eval"))
    assert [result.reward for result in trained] == [0.0, 0.0, 1.0, 1.0, 0.0, 0.0]
    assert [result.reward for result in held_out] == [0.0, 1.0, 0.0]


def test_watch_plays_pass_after_pass_until_it_is_interrupted(url, client, tmp_path):
    agent = write_agent(tmp_path, "ask('hello')\n")
    tasks = write_tasks(tmp_path, {"task_id": "a"}, {"task_id": "b"})
    options = ("--tasks", str(tasks), "--watch", "--out", "out", "--json")
    process = start_run(tmp_path, "--url", url, *options, "--", sys.executable, str(agent))
    results = tmp_path / "out/results.jsonl"
    wait_until(lambda: results.exists() and results.read_text().count("\n") >= 5, "three passes are over")
    os.kill(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 0
    runs = json.loads(out)["runs"]
    assert {run["pass_index"] for run in runs} >= {0, 1, 2}
    assert len({run["session_id"] for run in runs}) == len(runs)


def test_held_out_tasks_are_played_once_in_eval_sessions_without_a_group(url, client, tmp_path):
    agent = write_agent(tmp_path, "ask('hello')\n")
    tasks = write_tasks(tmp_path, {"task_id": "a", "split": "train"}, {"task_id": "b", "split": "eval"})
    options = ("--tasks", str(tasks), "--split", "eval", "--group-size", "2", "--out", "out")
    done = finished_run(tmp_path, "--url", url, *options, "--", sys.executable, str(agent))
    assert done.returncode == 0, done.stderr
    played = [(s["task_id"], s["split"], s["group_id"]) for s in sessions_of(client, tmp_path, "out")]
    assert played == [("b", "eval", None)]


@pytest.mark.parametrize(
    ("options", "command", "sentence"),
    [
        (["--tasks", "none.jsonl"], ["true"], "cannot read the tasks file 'none.jsonl'"),
        (["--tasks", "tasks.jsonl"], ["no-such-agent"], "there is no program 'no-such-agent'"),
        (["--tasks", "tasks.jsonl", "--reward-command", "./none.sh"], ["true"], "there is no program './none.sh'"),
        (["--tasks", "tasks.jsonl", "--as", "codx"], ["true"], "'codx' is no known agent"),
        (["--tasks", "tasks.jsonl", "--call", "nowhere:play"], [], "No module named 'nowhere'"),
        (["--watch"], ["true"], "--watch needs --tasks"),
        ([], [], "give either a command"),
        (["--url", "http://127.0.0.1:9", "--tasks", "tasks.jsonl"], ["true"], "was not ready within"),
    ],
)
def test_a_command_that_cannot_be_started_is_reported_in_one_sentence(url, tmp_path, options, command, sentence):
    write_tasks(tmp_path, {"task_id": "t"})
    done = finished_run(tmp_path, "--url", url, *options, *(["--", *command] if command else []))
    assert done.returncode in (1, 2)
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_an_agent_that_makes_no_call_is_stopped_with_the_end_of_its_log(url, tmp_path):
    agent = write_agent(tmp_path, "print('I looked at port 11434')\nsys.exit(1)\n")
    tasks = write_tasks(tmp_path, *({"task_id": str(number)} for number in range(50)))
    options = ("--tasks", str(tasks), "--parallel", "1", "--out", "out")
    done = finished_run(tmp_path, "--url", url, *options, "--", sys.executable, str(agent))
    assert done.returncode == 1
    assert "the first 3 runs made no model call (exit_status_1)" in done.stderr
    assert "I looked at port 11434" in done.stderr
    assert "Traceback" not in done.stderr


def test_runs_without_a_model_call_are_not_finished_and_the_repaired_agent_plays_them(url, client, tmp_path):
    """Two tasks whose agent fails first: exit status 1 with the cause; the same command then plays both."""
    write_agent(tmp_path, "print('my key is missing')\nsys.exit(2)\n")
    tasks = write_tasks(tmp_path, {"task_id": "a"}, {"task_id": "b"})
    options = ("--url", url, "--tasks", str(tasks), "--out", "out", "--", sys.executable, "agent.py")
    failed = finished_run(tmp_path, *options)
    assert failed.returncode == 1
    assert "no run made a model call (exit_status_2): the agent failed before its first call" in failed.stderr
    assert "the end of its log" in failed.stderr
    assert "my key is missing" in failed.stderr
    assert (tmp_path / "out/results.jsonl").read_text() == ""
    write_agent(tmp_path, "ask('hello')\n")
    assert finished_run(tmp_path, *options).returncode == 0
    played = [session["session_id"] for session in sessions_of(client, tmp_path, "out") if session["num_turns"] == 1]
    assert len(played) == 2


def test_a_function_that_makes_no_call_gets_an_error_with_the_clients_settings(url, tmp_path):
    (tmp_path / "idle_agent.py").write_text("def play(task, run):\n    return 1.0\n")
    tasks = write_tasks(tmp_path, *({"task_id": str(number)} for number in range(4)))
    done = finished_run(tmp_path, "--url", url, "--tasks", str(tasks), "--call", "idle_agent:play", "--out", "out")
    assert done.returncode == 1
    assert "its client needs run.base_url and run.api_key" in done.stderr


def test_a_broken_grader_leaves_the_session_without_a_reward_and_is_reported(url, client, tmp_path):
    agent = write_agent(tmp_path, "ask('hello')\n")
    write_program(tmp_path / "grade.sh", "#!/bin/sh\nexit 7\n")
    tasks = write_tasks(tmp_path, {"task_id": "t"})
    options = ("--tasks", str(tasks), "--reward-command", "./grade.sh", "--out", "out")
    done = finished_run(tmp_path, "--url", url, *options, "--", sys.executable, str(agent))
    assert done.returncode == 1
    assert "exit status 7" in done.stderr
    (session,) = sessions_of(client, tmp_path, "out")
    assert (session["status"], session["reward"]) == ("ended", None)


CALLED = """
import os, threading, time, urllib.request, json
print("imported", os.getpid())

def play(task, run):
    print("a print of the agent disturbs nothing")
    body = json.dumps({"model": run.model, "messages": [{"role": "user", "content": task["question"]}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + run.api_key}
    with urllib.request.urlopen(urllib.request.Request(run.base_url + "/chat/completions", body, headers)) as answer:
        said = json.load(answer)["choices"][0]["message"]["content"]
    assert os.listdir(run.directory) == []
    if said == "hang":
        time.sleep(600)
    if said == "die":
        os._exit(9)
    if said == "fail":
        raise ValueError("the agent failed")
    return [{"value": 1.0 if said == task["answer"] else 0.0}]

async def play_later(task, run):
    return play(task, run)
"""


@pytest.mark.parametrize("function", ["play", "play_later"])
def test_a_called_agent_is_imported_once_and_returns_its_reward(url, client, tmp_path, function):
    (tmp_path / "library_agent.py").write_text(CALLED)
    tasks = write_tasks(tmp_path, *({"task_id": str(n), "question": str(n % 3), "answer": "1"} for n in range(12)))
    options = ("--tasks", str(tasks), "--call", f"library_agent:{function}", "--parallel", "6", "--workers", "2")
    done = finished_run(tmp_path, "--url", url, *options, "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert {run["task_id"]: run["reward"] for run in report["runs"]} == {str(n): float(n % 3 == 1) for n in range(12)}
    # Once in each worker that was given a run; on a busy machine the first may play all of them.
    assert 1 <= (tmp_path / "out/workers.log").read_text().count("imported") <= 2
    assert {session["status"] for session in sessions_of(client, tmp_path, "out")} == {"ended"}


READS_INPUT = """
import subprocess, time, urllib.request, json

def play(task, run):
    body = json.dumps({"model": run.model, "messages": [{"role": "user", "content": "hello"}]}).encode()
    headers = {"Content-Type": "application/json", "Authorization": "Bearer " + run.api_key}
    urllib.request.urlopen(urllib.request.Request(run.base_url + "/chat/completions", body, headers)).close()
    return float(subprocess.run("cat", stdout=subprocess.PIPE, timeout=600).stdout == b"")
"""


def test_a_program_of_the_agent_reads_no_requests_of_other_runs(url, tmp_path):
    """`cat` without a file reads its standard input: were it the worker's, it would wait and take the next runs."""
    (tmp_path / "reading_agent.py").write_text(READS_INPUT)
    tasks = write_tasks(tmp_path, *({"task_id": str(number)} for number in range(6)))
    options = ("--tasks", str(tasks), "--call", "reading_agent:play", "--parallel", "2")
    done = finished_run(tmp_path, "--url", url, *options, "--out", "out", "--json")
    assert done.returncode == 0, done.stderr
    assert [run["reward"] for run in json.loads(done.stdout)["runs"]] == [1.0] * 6


def test_a_call_that_hangs_fails_or_ends_its_worker_fails_only_its_own_run(url, tmp_path):
    (tmp_path / "library_agent.py").write_text(CALLED)
    questions = ["a", "hang", "fail", "b", "die", "c", "d"]
    tasks = write_tasks(tmp_path, *({"task_id": each, "question": each, "answer": each} for each in questions))
    for limit in LIMITS:
        options = ("--tasks", str(tasks), "--call", "library_agent:play", "--parallel", "1", "--timeout", limit)
        done = finished_run(tmp_path, "--url", url, *options, "--out", f"out{limit}", "--json")
        assert done.returncode == 1
        runs = {run["task_id"]: run for run in json.loads(done.stdout)["runs"]}
        if [task_id for task_id, run in runs.items() if run["termination_reason"] == "timeout"] == ["hang"]:
            break
    assert [task_id for task_id, run in runs.items() if run["reward"] == 1.0] == ["a", "b", "c", "d"]
    assert runs["hang"]["termination_reason"] == "timeout"
    assert "the agent failed" in runs["fail"]["error"]
    assert "worker process ended" in runs["die"]["error"]
