"""What a bad version costs before it is rolled back: `python bench/poisoned.py [--json FILE]`.

Agents call a proxy in front of two fake engines without a pause while bad versions are published: broken files, another
tokenizer, and, past every check, replies that the canary has to notice. The exit status is 1 if a bad version stays
served, or a call fails. bench/learning/poisoned.py poisons a trainer instead.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
from pydantic import PrivateAttr
from safetensors.numpy import save_file
from servers import running
from turnwise_fake_engine import Reply, Script, running_fake_engine
from turnwise_fake_engine.ledger import EngineState

from turnwise.processes.ports import free_port
from turnwise.processes.stack import command
from turnwise.types import Json

NUM_AGENTS = 6
DEADLINE_SECONDS = 600.0
CANARY = ("--canary-share", "0.25", "--canary-min-sessions", "8", "--canary-reward-drop", "0.2")


class Weights(Script):
    """Replies that depend on the loaded weights' directory."""

    _state: EngineState = PrivateAttr()

    def of(self, state: EngineState) -> Self:
        """Return these replies for an engine."""
        self._state = state
        return self

    def take_reply(self, last_message: str, *, offers_tools: bool = False) -> Reply | None:
        """Return the reply of the weights that the call is sampled with."""
        del last_message, offers_tools
        name = Path(self._state.weights_path).name
        return Reply(text="no" if name == "wrong" else "yes", finish_reason="length" if name == "rambling" else "stop")


class Agents:
    """Agents that call without a pause; a session has two calls and is rewarded for `yes`."""

    def __init__(self, url: str, name: str) -> None:
        self._url, self._name = url, name
        self._stop = threading.Event()
        self.num_calls = 0
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_AGENTS)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let each agent finish its session."""
        self._stop.set()
        for thread in self._threads:
            thread.join(DEADLINE_SECONDS)

    def _run(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self._play(f"{self._name}-{number}-{count}")
            except OSError as error:
                self.failures.append(repr(error))

    def _play(self, session_id: str) -> None:
        messages: list[Json] = [{"role": "user", "content": "Yes or no?"}]
        for _ in range(2):
            path = f"/sessions/{session_id}/v1/chat/completions"
            answer = ask(self._url, path, {"model": "fake", "messages": messages})["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "Sure?"}]
            self.num_calls += 1
        ask(self._url, f"/v1/sessions/{session_id}/end", {"reward": float(answer["content"] == "yes")})


def ask(url: str, path: str, body: Json | None = None) -> Json:
    """GET a path, or POST a body to it; return the answer."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=DEADLINE_SECONDS) as response:
        found: Json = json.loads(response.read())
    return found


def serving() -> Iterator[Json]:
    """Publish bad versions under running calls; yield the figures of each."""
    with tempfile.TemporaryDirectory(prefix="turnwise-poisoned-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        engines = [stack.enter_context(running_fake_engine()) for _ in range(2)]
        for engine in engines:
            engine.state.script = Weights().of(engine.state)
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        argv = [*(part for engine in engines for part in ("--engine", engine.url)), "--port", str(port), *CANARY]
        database = f"sqlite:///{directory / 'ledger.db'}"
        stack.enter_context(
            running(command("proxy", *argv, "--database", database, "--log-level", "error"), f"{url}/readyz")
        )
        good = _publish(url, write_weights(directory / "good"))
        _wait(url, good, "active")
        for poison, path in _bad_versions(directory, Path(engines[0].state.model_path)):
            yield _serve(url, poison, path)


def _bad_versions(directory: Path, served: Path) -> Iterator[tuple[str, Path]]:
    truncated = write_weights(directory / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2])
    yield "truncated checkpoint", truncated
    yield "weights with a NaN", write_weights(directory / "nan", np.nan)
    drifted = write_weights(directory / "drifted")
    tokenizer = json.loads((served / "tokenizer.json").read_text())
    tokens = list(tokenizer["model"]["vocab"])
    tokenizer["model"]["vocab"] = {token: number for number, token in enumerate(tokens[1:] + tokens[:1])}
    (drifted / "tokenizer.json").write_text(json.dumps(tokenizer))
    yield "drifted tokenizer", drifted
    yield "flipped reward (every reply is wrong)", write_weights(directory / "wrong")
    yield "learning rate × 100 (every reply is cut off)", write_weights(directory / "rambling")


def write_weights(place: Path, value: float = 0.0) -> Path:
    """Write a version that fake engines load."""
    place.mkdir()
    (place / "config.json").write_text("{}")
    save_file({"w": np.full(4, value, np.float32)}, place / "model.safetensors")
    return place


def _serve(url: str, poison: str, path: Path) -> Json:
    """Publish a bad version under running calls, and wait until it is marked failed."""
    agents = Agents(url, path.name)
    try:
        time.sleep(0.5)
        first, started = agents.num_calls, time.perf_counter()
        try:
            version = _publish(url, path)
            failed = _wait(url, version, "failed")
            reason = failed["error"]
            who = "check before the load" if str(path) in reason else "canary"
        except urllib.error.HTTPError as error:
            version, who = None, "publish call"
            reason = json.loads(error.read())["error"]["message"]
        seconds, calls = time.perf_counter() - started, agents.num_calls - first
    finally:
        agents.stop()
    affected = 0 if version is None else _calls_of(url, version)
    return {
        "poison": poison,
        "noticed by": who,
        "after": f"{seconds:.1f} s",
        "affected": f"{affected} of {calls} calls",
        "failed calls": len(agents.failures),
        "reason": reason,
        "passed": not agents.failures,
    }


def _publish(url: str, path: Path) -> int:
    return int(ask(url, "/v1/policies", {"path": str(path)})["version"])


def _wait(url: str, version: int, status: str) -> Json:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        found: Json = next(each for each in ask(url, "/v1/policies")["data"] if each["version"] == version)
        if found["status"] == status:
            return found
        time.sleep(0.02)
    raise TimeoutError(f"version {version} is {found['status']}, not {status}: {found}")


def _calls_of(url: str, version: int) -> int:
    """Return the number of turns that a version sampled."""
    count, after = 0, ""
    while True:
        page = ask(url, f"/v1/sessions?limit=1000{after}")
        for session in page["data"]:
            turns = ask(url, f"/v1/sessions/{session['session_id']}/turns")["data"]
            count += sum(turn["policy_version_last"] == version for turn in turns)
        if not page["has_more"]:
            return count
        after = f"&after={page['data'][-1]['session_id']}"


def main() -> int:
    """Publish every bad version; print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    found = list(_printed(serving()))
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return 0 if all(row["passed"] for row in found) else 1


def _printed(rows: Iterator[Json]) -> Iterator[Json]:
    names = ("poison", "noticed by", "after", "affected", "failed calls", "reason")
    print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(str(row[name]) for name in names)} |", flush=True)
        yield row


if __name__ == "__main__":
    sys.exit(main())
