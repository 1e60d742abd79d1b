"""deploy/ray: engines, trainers of several hosts and rollouts on a Ray cluster of two nodes, two raylets here."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import openai
import pytest
from support.migrated import migrated
from support.ports import free_port
from support.trainer_ledger import write_settings
from support.waiting import wait_until

from turnwise.client import Client
from turnwise.processes.guard import guarded

FLEET = Path(__file__).resolve().parents[2] / "deploy" / "ray" / "fleet.py"
NUM_ENGINES = 3
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None,
        reason="Ray is not installed here: pip install '.[ray]' in an environment of its own",
    ),
]

REDUCE = """
import os, pathlib, sys, torch
torch.distributed.init_process_group("gloo")
rank = torch.tensor([float(torch.distributed.get_rank() + 1)])
torch.distributed.all_reduce(rank)
pathlib.Path(sys.argv[1], f"rank-{torch.distributed.get_rank()}").write_text(str(rank.item()))
"""
AGENT = """
import json, os, urllib.request
body = json.dumps({"model": "fake", "messages": [{"role": "user", "content": os.environ["TURNWISE_TASK_ID"]}]}).encode()
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
head = {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
urllib.request.urlopen(urllib.request.Request(url, body, head)).read()
"""


@contextlib.contextmanager
def running(directory, name, *command):
    """Run a command until the block ends; yield what returns its output so far, and fails where it has ended."""
    log = directory / f"{name}.log"

    def said():
        text = log.read_text(errors="replace")
        assert process.poll() is None, text[-3000:]
        return text

    with log.open("wb") as output:
        process = subprocess.Popen(guarded(command, 30.0), stdout=output, stderr=output, env=ENVIRONMENT, cwd=directory)
    try:
        yield said
        said()
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def cluster():
    """Two nodes with two CPUs each, in a directory with a short name, because Ray makes sockets there."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as made, contextlib.ExitStack() as nodes:
        directory, port = Path(made), free_port()
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--node-ip-address", "127.0.0.1"]
        ray += ["--num-cpus", "2", "--num-gpus", "0", "--object-store-memory", str(100 * 2**20)]
        ray += ["--min-worker-port", "0", "--max-worker-port", "0", "--dashboard-agent-listen-port", "0"]
        first = ["--head", "--port", str(port), "--include-dashboard", "false", "--temp-dir", made]
        said = nodes.enter_context(running(directory, "first", *ray, *first))
        wait_until(lambda: "Ray runtime started" in said(), "the first node starts")
        said = nodes.enter_context(running(directory, "second", *ray, "--address", f"127.0.0.1:{port}"))
        wait_until(lambda: "Ray runtime started" in said(), "the second node starts")
        yield directory, [sys.executable, str(FLEET), "--address", f"127.0.0.1:{port}"]


def engine_on(port):
    """Return the process id of the engine that listens on a port: no shell, guard or actor has this command line."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if words[1:4] == [b"-m", b"turnwise", b"fake-engine"] and str(port).encode() in words:
                return int(process.name)
    return None


def test_engines_come_back_trainers_meet_and_rollouts_are_played_on_two_nodes(cluster):
    directory, fleet = cluster
    file, url = directory / "engines.json", f"http://127.0.0.1:{free_port()}"
    stand_in = [sys.executable, "-m", "turnwise", "fake-engine", "--host", "{host}", "--port", "{port}"]
    start = [*fleet, "engines", "--number", str(NUM_ENGINES), "--cpus", "0.5", "--file", str(file), "--", *stand_in]
    database = migrated(f"sqlite:///{directory}/turnwise.db")
    proxy = [sys.executable, "-m", "turnwise", "proxy", "--port", url.rpartition(":")[2], "--database", database]

    def named():
        return json.loads(file.read_text()) if file.exists() else []

    def serving(http):
        answer = http.get("/readyz").json()
        return {each["url"] for each in answer.get("engines", ()) if each["ready"]}

    def ask(number):
        """Ask as an agent does: a call whose engine is killed gets 503, and OpenAI's SDK sends it again."""
        with openai.OpenAI(
            base_url=f"{url}/sessions/s{number % 12}/v1",
            api_key="none",
            max_retries=10,
            http_client=httpx2.Client(timeout=300.0, trust_env=False),
        ) as client:
            messages = [{"role": "user", "content": f"call {number}"}]
            return client.chat.completions.create(model="fake", messages=messages).choices[0].finish_reason

    with contextlib.ExitStack() as parts:
        fleets = parts.enter_context(running(directory, "engines", *start))
        wait_until(lambda: fleets() is not None and len(named()) == NUM_ENGINES, "all engines are named")
        proxies = parts.enter_context(running(directory, "proxy", *proxy, "--engines", f"file://{file}"))
        http = parts.enter_context(httpx2.Client(base_url=url, timeout=300.0, trust_env=False))
        wait_until(lambda: proxies() is not None and _is_up(http), "the proxy serves")
        wait_until(lambda: serving(http) == set(named()), "all engines serve")

        stop, finished = threading.Event(), []

        def call(worker):
            number = worker
            while not stop.is_set():
                number += 3
                finished.append(ask(number))

        with ThreadPoolExecutor(3) as pool:
            callers = [pool.submit(call, worker) for worker in range(3)]
            try:
                before = set(named())
                victim = min(before)
                os.kill(engine_on(int(victim.rpartition(":")[2])), signal.SIGKILL)
                wait_until(lambda: victim not in named() and len(named()) == NUM_ENGINES, "another one is named")
                wait_until(lambda: serving(http) == set(named()), "all of them serve")
                answered = len(finished)
                wait_until(lambda: len(finished) > answered + 12, "calls go on")
            finally:
                stop.set()
            [each.result() for each in callers]
        print(f"{len(finished)} calls while an engine was killed, none failed")
        assert set(finished) == {"stop"}

        script = directory / "reduce.py"
        script.write_text(REDUCE)
        reduce = ["train", "--hosts", "2", "--cpus", "0.5", "--", str(script), str(directory)]
        done = subprocess.run(
            [*fleet, *reduce], check=False, env=ENVIRONMENT, capture_output=True, text=True, cwd=directory
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert [(directory / f"rank-{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]

        tasks = directory / "tasks.jsonl"
        tasks.write_text("".join(f'{{"task_id": "t{number}"}}\n' for number in range(4)))
        agent = ["--url", url, "--reward-command", "true", "--", sys.executable, "-c", AGENT]
        play = ["rollouts", "--tasks", str(tasks), "--out", str(directory / "out"), "--parts", "2", "--cpus", "0.5"]
        done = subprocess.run(
            [*fleet, *play, "--", *agent], check=False, env=ENVIRONMENT, capture_output=True, text=True, cwd=directory
        )
        assert done.returncode == 0, done.stderr[-3000:]
        played = [
            json.loads(line)["task_id"]
            for part in ("part-0", "part-1")
            for line in (directory / "out" / part / "results.jsonl").read_text().splitlines()
        ]
        assert sorted(played) == ["t0", "t1", "t2", "t3"]


@pytest.mark.engine
def test_a_vllm_on_one_node_serves_what_turnwise_train_has_trained_on_both(cluster, small_model_dir):
    """What is served is what both hosts made together: a version that every turn afterwards names."""
    directory, fleet = cluster
    file, url = directory / "vllm.json", f"http://127.0.0.1:{free_port()}"
    turnwise = [sys.executable, "-m", "turnwise"]
    vllm = [
        "engine",
        "--model",
        str(small_model_dir),
        "--served-model-name",
        "small",
        "--device",
        "cpu",
        "--allow-remote",
    ]
    start = [*fleet, "engines", "--number", "1", "--cpus", "0.5", "--file", str(file), "--", *turnwise, *vllm]
    database = migrated(f"sqlite:///{directory}/ledger.db")
    proxy = ["proxy", "--port", url.rpartition(":")[2], "--database", database, "--engines", f"file://{file}"]
    config = write_settings(
        directory / "train.toml",
        directory,
        small_model_dir,
        row_tokens=256,
        groups_per_batch=2,
        total_batches=1,
        weight_transfer=False,
    )
    train = ["train", "--hosts", "2", "--cpus", "0.5", "--", "-m", "turnwise", "train", "--config", str(config)]
    with contextlib.ExitStack() as parts:
        engines = parts.enter_context(running(directory, "vllm", *start, "--host", "{host}", "--port", "{port}"))
        wait_until(lambda: engines() is not None and file.exists(), "vLLM is named")
        proxies = parts.enter_context(running(directory, "vllm-proxy", *turnwise, *proxy))
        client = parts.enter_context(Client(url, max_retries=100))
        http = parts.enter_context(httpx2.Client(base_url=url, timeout=300.0, trust_env=False))
        wait_until(lambda: proxies() is not None and _is_up(http), "the proxy serves")
        for number in range(8):
            group = f"g{number // 4}"
            session = client.create_session(task_id=group, group_id=group, group_size=4)
            play(session, group)
            session.end(reward=float(number % 2))
        done = subprocess.run(
            [*fleet, *train, "--multi-devices"],
            check=False,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            cwd=directory,
        )
        assert done.returncode == 0, done.stderr[-5000:]
        wait_until(
            lambda: [each["version"] for each in client.policies() if each["status"] == "active"] == [1],
            "vLLM serves what was trained",
        )
        session = client.create_session()
        play(session, "afterwards")
        assert [turn["policy_version_first"] for turn in session.turns()] == [1]
        (update,) = client.updates()
        assert (update["num_groups"], update["num_sessions"]) == (2, 8)


def play(session, text):
    asked = {"model": "small", "messages": [{"role": "user", "content": f"Which city, {text}?"}]}
    session.openai().chat.completions.create(**asked, max_completion_tokens=8, extra_body={"ignore_eos": True})


def _is_up(http):
    with contextlib.suppress(httpx2.TransportError):
        return http.get("/healthz").is_success
    return False
