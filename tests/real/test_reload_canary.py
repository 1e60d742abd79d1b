"""A bad update is rolled back automatically after a bounded share of the traffic; a good update is promoted.

Agents open sessions continuously, make two calls in each and end it with a reward for the reply. An engine whose
weights or adapter are in a directory called `poisoned` gives wrong replies.
"""

import collections
import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import PrivateAttr
from support.control_plane import ask, policy, publish, wait_for_status
from support.proxies import RunningProxy
from support.tiny_checkpoints import write_adapter, write_probe, write_weights
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Reply, RunningFakeEngine, Script, running_fake_engine
from turnwise_fake_engine.ledger import EngineState

SHARE = 0.25
NUM_AGENTS = 6
FLAGS = ("--canary-share", str(SHARE), "--canary-min-sessions", "8", "--canary-reward-drop", "0.2")


class Weights(Script):
    _state: EngineState = PrivateAttr()

    def take_reply(self, last_message: str, *, offers_tools: bool = False) -> Reply | None:
        del last_message, offers_tools
        model = self._state.calls[-1].body.get("model")
        name = Path(self._state.adapters.get(model) or self._state.weights_path).name
        if name == "broken":
            return Reply(text="yes", finish_reason="length")
        return Reply(text="no" if name == "poisoned" else "yes")


@pytest.fixture
def engines() -> Iterator[list[RunningFakeEngine]]:
    with running_fake_engine() as first, running_fake_engine() as second:
        for engine in (first, second):
            script = Weights(lora=True)
            script._state = engine.state
            engine.state.script = script
        yield [first, second]


WRITE = {"full": write_weights, "lora": write_adapter}


class Agents:
    def __init__(self, proxy: RunningProxy) -> None:
        self._proxy = proxy
        self._stop = threading.Event()
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(NUM_AGENTS)]
        for thread in self._threads:
            thread.start()

    def _run(self, number: int) -> None:
        count = 0
        while not self._stop.is_set():
            count += 1
            try:
                self._play(f"agent{number}-{count}")
            except OSError as error:
                self.failures.append(repr(error))

    def _play(self, session_id: str) -> None:
        messages = [{"role": "user", "content": "Yes or no?"}]
        for _ in range(2):
            reply = ask(
                self._proxy.url, f"/sessions/{session_id}/v1/chat/completions", {"model": "fake", "messages": messages}
            )
            answer = reply["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "Sure?"}]
        ask(
            self._proxy.url,
            f"/v1/sessions/{session_id}/end",
            {"reward": 1.0 if answer["content"] == "yes" else 0.0, "termination_reason": "ENV_DONE"},
        )

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT_SECONDS)


@contextlib.contextmanager
def playing(proxy: RunningProxy) -> Iterator[Agents]:
    agents = Agents(proxy)
    try:
        yield agents
    finally:
        agents.stop()


def versions_of_sessions(proxy: RunningProxy) -> dict[str, list[int]]:
    found = collections.defaultdict(list)
    for view in proxy.turns():
        found[view.turn.session_id] += [view.turn.policy_version_first, view.turn.policy_version_last]
    return found


@pytest.mark.parametrize(
    ("kind", "poison", "words", "num_workers"),
    [
        ("full", "poisoned", "mean session reward", 1),
        pytest.param("lora", "broken", "turns are broken", 1, marks=pytest.mark.slow),
        pytest.param("lora", "poisoned", "mean session reward", 2, marks=pytest.mark.slow),
        pytest.param("full", "poisoned", "mean session reward", 2, marks=pytest.mark.slow),
        pytest.param("full", "broken", "turns are broken", 1, marks=pytest.mark.slow),
    ],
)
def test_a_poisoned_update_is_rolled_back_automatically_and_a_good_one_is_promoted(
    engines, start_proxy, tmp_path, kind, poison, words, num_workers
):
    """Only the canary's share of the sessions samples with it, and only the roll-back moves a running session.

    Each call has its own connection, so with two workers the sessions move between them.
    """
    urls = [engine.url for engine in engines][: 2 if kind == "full" else 1]
    proxy = start_proxy(
        urls[0], *(flag for url in urls[1:] for flag in ("--engine", url)), *FLAGS, "--workers", str(num_workers)
    )
    good = publish(proxy, WRITE[kind](tmp_path / "good"), kind=kind)
    wait_for_status(proxy, good, "active")
    with playing(proxy) as agents:
        bad = publish(proxy, WRITE[kind](tmp_path / poison), kind=kind)
        failed = wait_for_status(proxy, bad, "failed")
        rolled_back = len(versions_of_sessions(proxy))
        after = publish(proxy, WRITE[kind](tmp_path / "after"), kind=kind)
        wait_for_status(proxy, after, "active")
    assert agents.failures == []
    assert failed["error"].startswith("rolled back as a canary: ")
    assert words in failed["error"]
    canary, control = failed["arms"]["canary"], failed["arms"]["control"]
    assert (canary["version"], control["version"]) == (bad, good)
    assert min(canary["num_sessions"], control["num_sessions"]) >= 8
    assert control["mean_reward"] == 1.0
    assert canary["mean_reward"] < 1.0 or canary["broken_share"] > 0.0
    by_session = versions_of_sessions(proxy)
    saw = [versions for versions in by_session.values() if bad in versions]
    turns = [version for versions in by_session.values() for version in versions[::2]]
    print(
        f"\n{kind}, {poison}: rolled back after {rolled_back} sessions: {failed['error']}\n"
        f"{len(saw)} sessions of them saw it ({len(saw) / rolled_back:.1%}; the share was {SHARE:.0%}), "
        f"{turns.count(bad)} of {len(turns)} calls in all"
    )
    assert 8 <= len(saw) <= 2 * SHARE * rolled_back
    changed = [versions for versions in saw if good in versions]
    assert len(changed) <= NUM_AGENTS
    assert all(versions.index(bad) < versions.index(good) for versions in changed), "into the trial in the middle"


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_version_too_far_from_the_served_one_is_never_tried(engines, start_proxy, tmp_path, kind):
    """Each token of the probe is 3 nats less likely: e⁻³ − 1 + 3 = 2.05 nats a token, and the limit is 1.

    Half a nat is 0.107, and is tried. The far version's own probe matches the engine's logprobs, so it has no other
    defect.
    """
    for engine in engines:
        engine.state.script.logprob_shifts = {"far": -3.0, "near": -0.5}
    urls = [engine.url for engine in engines][: 2 if kind == "full" else 1]
    proxy = start_proxy(urls[0], *(flag for url in urls[1:] for flag in ("--engine", url)), *FLAGS)
    good = publish(proxy, write_probe(WRITE[kind](tmp_path / "good"), 0.0), kind=kind)
    wait_for_status(proxy, good, "active")
    far = publish(proxy, write_probe(WRITE[kind](tmp_path / "far"), -3.0), kind=kind)
    failed = wait_for_status(proxy, far, "failed")
    assert "it is 2.05 nats a token from the served version; the limit is 1" in failed["error"]
    near = publish(proxy, write_probe(WRITE[kind](tmp_path / "near"), -0.5), kind=kind)
    wait_for_status(proxy, near, "canary")
    assert policy(proxy, good)["status"] == "active"
