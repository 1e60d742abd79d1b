"""The process that posts rewards, over a stand-in of the client."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

import pytest
from support.waiting import WAIT_SECONDS

from turnwise.errors import Conflict, GraderFailed, ProxyUnavailable
from turnwise.rewards.grader import Grade
from turnwise.rewards.posting import Poster, read_state
from turnwise.rewards.settings import RewardSettings
from turnwise.rewards.sources import PythonSource
from turnwise.types import Json

ALONE = {"group_id": None, "group_size": None}


class ProxyOfOneSession:
    """Has one ended session; the first requests find no proxy."""

    def __init__(self, num_outages: int) -> None:
        self._num_outages = num_outages
        self.posted: list[Mapping[str, Any]] = []

    async def sessions(self, **_: Any) -> AsyncIterator[Json]:
        if self._num_outages:
            self._num_outages -= 1
            raise ProxyUnavailable("cannot reach it")
        yield {"session_id": "s0", "num_turns": 1, "reward": None, "metadata": {}, **ALONE}

    async def turns(self, _: str) -> AsyncIterator[Json]:
        return
        yield {}

    async def rewards(self, lines: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> list[int]:
        assert idempotency_key == "reward/judge/reward/s0"
        self.posted += lines
        return [1]


class OneReward:
    async def decide(self, _: Sequence[Json]) -> list[Grade]:
        return [Grade(0.5)]

    async def close(self) -> None:
        """Hold nothing."""


@pytest.fixture(autouse=True)
def polls_often(monkeypatch):
    monkeypatch.setattr("turnwise.rewards.posting.POLL_SECONDS", 0.01)


def poster_for(tmp_path, proxy, said: list[str], **settings: Any) -> Poster:
    rule = RewardSettings(source="judge", state=tmp_path / "state.jsonl", **settings)
    return Poster(rule, proxy, OneReward(), said.append)


async def test_a_watching_process_outlives_an_outage_of_the_proxy(tmp_path):
    proxy, said = ProxyOfOneSession(num_outages=2), list[str]()
    counts = await poster_for(tmp_path, proxy, said, watch=True, max_sessions=1).run()
    assert [line["value"] for line in proxy.posted] == [0.5]
    assert (counts.num_sessions, counts.num_rewards) == (1, 1)
    assert said[:2] == ["0 sessions  0 rewards  no reward yet, trying again: cannot reach it"] * 2


async def test_a_state_line_that_was_cut_does_not_spoil_the_next_one(tmp_path):
    state = tmp_path / "state.jsonl"
    state.write_text(json.dumps({"session_id": "earlier"}) + '\n{"session_id": "cu')
    await poster_for(tmp_path, ProxyOfOneSession(num_outages=0), []).run()
    assert read_state(state) == {"earlier", "s0"}


@pytest.mark.parametrize(("stored", "num_failed"), [(0.25, 0), (None, 1)])
async def test_a_used_key_counts_as_done_only_if_its_session_has_a_reward(tmp_path, stored, num_failed):
    class ProxyWithAUsedKey(ProxyOfOneSession):
        async def rewards(self, *_: Any, **__: Any) -> list[int]:
            raise Conflict("idempotency key was used with another body")

        async def session(self, _: str) -> Json:
            return {"reward": stored}

    counts = await poster_for(tmp_path, ProxyWithAUsedKey(num_outages=0), []).run()
    assert counts.num_failed == num_failed
    assert read_state(tmp_path / "state.jsonl") == (set() if num_failed else {"s0"})


class ProxyThatGoesDown:
    """Has five ended sessions; the post of the first one fails while the second one is decided on."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        """Sessions that were read."""
        self.posted: list[str] = []
        self._is_second_begun = asyncio.Event()
        self._is_down = asyncio.Event()

    async def sessions(self, **_: Any) -> AsyncIterator[Json]:
        for number in range(5):
            yield {"session_id": f"s{number}", "num_turns": 1, "reward": None, "metadata": {}, **ALONE}

    async def turns(self, session_id: str) -> AsyncIterator[Json]:
        self.asked.append(session_id)
        if session_id == "s1":
            self._is_second_begun.set()
        return
        yield {}

    async def rewards(self, lines: Iterable[Mapping[str, Any]], **_: Any) -> list[int]:
        (session_id,) = (line["session_id"] for line in lines)
        if session_id == "s0":
            await self._is_second_begun.wait()
            self._is_down.set()
            raise ProxyUnavailable("cannot reach it")
        await self._is_down.wait()
        self.posted.append(session_id)
        return [1]


async def test_after_an_outage_no_further_session_is_decided_on_and_those_begun_are_finished(tmp_path):
    """Each further session would be judged, with paid calls, and wait for all attempts to post."""
    proxy = ProxyThatGoesDown()
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(ProxyUnavailable):
            await poster_for(tmp_path, proxy, [], parallel=2).run()
    assert (proxy.asked, proxy.posted) == (["s0", "s1"], ["s1"])
    assert read_state(tmp_path / "state.jsonl") == {"s1"}


@pytest.mark.parametrize(("settings", "graded"), [({}, ["s1"]), ({"unrewarded": False}, ["s0", "s1"])])
async def test_a_session_that_somebody_rewarded_is_graded_only_on_request(tmp_path, settings, graded):
    """A line of the session would take the place of a person's rewards of its turns."""

    class ProxyOfARatedSession(ProxyOfOneSession):
        async def sessions(self, **_: Any) -> AsyncIterator[Json]:
            for name, reward in {"s0": 0.8, "s1": None}.items():
                yield {"session_id": name, "num_turns": 1, "reward": reward, "metadata": {}, **ALONE}

        async def rewards(self, lines: Iterable[Mapping[str, Any]], **_: Any) -> list[int]:
            self.posted += lines
            return [1]

    proxy = ProxyOfARatedSession(num_outages=0)
    counts = await poster_for(tmp_path, proxy, [], **settings).run()
    assert sorted(line["session_id"] for line in proxy.posted) == graded
    assert counts.num_rewarded_before == 2 - len(graded)
    assert ("1 had a reward (--no-unrewarded)" in counts.line()) == (len(graded) == 1)


def raises_system_exit(_: Json) -> float:
    raise SystemExit("no GPU")


def raises_stop_iteration(_: Json) -> float:
    return next(iter(()))


async def exits_in_a_coroutine(_: Json) -> float:
    raise SystemExit("no GPU")


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        (raises_system_exit, "SystemExit: no GPU"),
        (raises_stop_iteration, "StopIteration: "),
        (exits_in_a_coroutine, "SystemExit: no GPU"),
    ],
)
async def test_a_grader_that_raises_any_exception_fails_at_once_with_its_cause(monkeypatch, function, cause):
    """A thread that ends without a result would look like a function that hangs."""
    monkeypatch.setattr("turnwise.rewards.sources.load_function", lambda _: function)
    source = PythonSource(RewardSettings(source="python", function="mine:grade"))
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(GraderFailed, match=f"^mine:grade failed: {cause}"):
            await source.decide([{}])
