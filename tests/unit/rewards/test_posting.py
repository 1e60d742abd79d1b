"""The process that posts rewards, over a stand-in of the client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import Any

from turnwise.errors import ProxyUnavailable
from turnwise.rewards.posting import Poster, read_state
from turnwise.rewards.settings import RewardSettings
from turnwise.rewards.verdict import Reward
from turnwise.types import Json


class ProxyOfOneSession:
    """Has one ended session; the first requests find no proxy."""

    def __init__(self, num_outages: int) -> None:
        self._num_outages = num_outages
        self.posted: list[Mapping[str, Any]] = []

    async def sessions(self, **_: Any) -> AsyncIterator[Json]:
        if self._num_outages:
            self._num_outages -= 1
            raise ProxyUnavailable("cannot reach it")
        yield {"session_id": "s0", "num_turns": 1, "metadata": {}, "group_id": None, "group_size": None}

    async def turns(self, _: str) -> AsyncIterator[Json]:
        return
        yield {}

    async def rewards(self, lines: Iterable[Mapping[str, Any]], *, idempotency_key: str | None = None) -> list[int]:
        assert idempotency_key == "reward/next_state/reward/s0"
        self.posted += lines
        return [1]


class OneReward:
    async def decide(self, _: Sequence[Json]) -> list[Reward]:
        return [Reward(0.5)]

    async def close(self) -> None:
        """Hold nothing."""


def poster_for(tmp_path, proxy, said: list[str], **settings: Any) -> Poster:
    rule = RewardSettings(source="next_state", state=tmp_path / "state.jsonl", poll_seconds=0.01, **settings)
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
