"""Agents that retry through crashes: each repeats each of its calls until it completes.

They run in a separate thread, so that a test can kill the proxy. Half of them stream; half mark each call with an
`Idempotency-Key`, so that a repeated call must be found again and not be sampled twice.
"""

import asyncio
import collections
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator

import aiohttp
import orjson
from support.proxies import RunningProxy
from support.streamed_replies import StreamedReply
from turnwise_fake_engine import RunningFakeEngine

PAUSE_SECONDS = 0.05
"""Between two attempts of one call."""
PATIENCE_SECONDS = 60.0
"""Limit of one attempt."""
PROGRESS_SECONDS = 180.0
"""Limit of a wait for replies."""
CALLS_PER_SESSION = 5


@dataclasses.dataclass(slots=True)
class CompleteReply:
    turn_id: str
    text: str


@dataclasses.dataclass(slots=True)
class Agent:
    number: int
    seen: list[CompleteReply] = dataclasses.field(default_factory=list)
    refusals: set[tuple[int, str]] = dataclasses.field(default_factory=set)
    """Statuses and codes of the errors that it received."""

    def session_id(self, call: int) -> str:
        return f"agent-{self.number}-{call // CALLS_PER_SESSION}"

    def messages(self, call: int) -> list[dict[str, str]]:
        first = call - call % CALLS_PER_SESSION
        replies = [{"role": "assistant", "content": seen.text} for seen in self.seen[first:call]]
        asked = [{"role": "user", "content": f"{self.number} asks {number}"} for number in range(first, call + 1)]
        return [message for pair in zip(asked, replies, strict=False) for message in pair] + asked[-1:]

    @property
    def streams(self) -> bool:
        return self.number % 2 == 0

    @property
    def has_keys(self) -> bool:
        return self.number % 4 < 2

    async def play(self, http: aiohttp.ClientSession, base: str, go: asyncio.Event, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await go.wait()
            seen = await self._try(http, base)
            if seen is not None:
                self.seen.append(seen)
            else:
                await asyncio.sleep(PAUSE_SECONDS)

    async def _try(self, http: aiohttp.ClientSession, base: str) -> CompleteReply | None:
        call = len(self.seen)
        headers = {"content-type": "application/json"}
        if self.has_keys:
            headers["idempotency-key"] = f"{self.number}-{call}"
        body = {"model": "fake", "messages": self.messages(call), "stream": self.streams}
        url = f"{base}/sessions/{self.session_id(call)}/v1/chat/completions"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionResetError):
            async with http.post(url, data=orjson.dumps(body), headers=headers) as response:
                if response.status != 200:
                    self.refusals.add((response.status, (await response.json())["error"]["code"]))
                    return None
                return await (_streamed(response) if self.streams else _complete(response))
        return None


async def _complete(response: aiohttp.ClientResponse) -> CompleteReply:
    reply = await response.json()
    return CompleteReply(reply["id"], reply["choices"][0]["message"]["content"])


async def _streamed(response: aiohttp.ClientResponse) -> CompleteReply | None:
    reply = StreamedReply()
    with contextlib.suppress(TimeoutError):
        await reply.read(response)
    return CompleteReply(reply.turn_id, reply.text) if reply.is_complete else None


class Agents:
    def __init__(self, base: str, count: int) -> None:
        self.all = [Agent(number) for number in range(count)]
        self._base = base
        self._loop = asyncio.new_event_loop()
        self._go, self._stop = asyncio.Event(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)

    def start(self) -> None:
        """Start the thread; the agents wait for `go`."""
        self._thread.start()

    def go(self) -> None:
        self._loop.call_soon_threadsafe(self._go.set)

    def hold(self) -> None:
        self._loop.call_soon_threadsafe(self._go.clear)

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self.go()
        self._thread.join(PATIENCE_SECONDS + 5)
        assert not self._thread.is_alive()

    @property
    def num_seen(self) -> int:
        return sum(len(agent.seen) for agent in self.all)

    @property
    def refusals(self) -> set[tuple[int, str]]:
        return set().union(*(agent.refusals for agent in self.all))

    def _run(self) -> None:
        self._loop.run_until_complete(self._play())
        self._loop.close()

    async def _play(self) -> None:
        timeout = aiohttp.ClientTimeout(total=PATIENCE_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*(agent.play(http, self._base, self._go, self._stop) for agent in self.all))


def wait_for(agents: Agents, count: int) -> None:
    before, deadline = agents.num_seen, time.monotonic() + PROGRESS_SECONDS
    while agents.num_seen < before + count:
        assert time.monotonic() < deadline, f"the agents get no further replies: {agents.refusals}"
        time.sleep(0.05)


@contextlib.contextmanager
def playing(base: str, count: int) -> Iterator[Agents]:
    """Let agents play until the block ends; they wait until `go`."""
    agents = Agents(base, count)
    agents.start()
    try:
        yield agents
    finally:
        agents.stop()


def assert_nothing_is_lost_or_doubled(agents: Agents, proxy: RunningProxy, engine: RunningFakeEngine) -> None:
    """Check every complete reply against the store, and the store against the engine."""
    stored = {view.turn.turn_id: view for view in proxy.turns()}
    sampled = {call.reply_id: call.token_ids[0] for call in engine.calls if call.token_ids}
    assert agents.num_seen
    for turn_id, view in stored.items():
        if len(view.turn.token_ids):
            kept = view.turn.token_ids.tolist()
            assert kept == sampled[turn_id][: len(kept)]
    by_session = collections.defaultdict(list)
    for view in stored.values():
        by_session[view.turn.session_id].append(view)
    for views in by_session.values():
        assert sorted(view.turn.seq for view in views) == list(range(len(views)))
    for agent in agents.all:
        for call, seen in enumerate(agent.seen):
            view = stored[seen.turn_id]
            assert view.turn.response["content"] == seen.text
            assert view.turn.finish_reason is not None
            assert view.turn.token_ids.tolist() == sampled[seen.turn_id]
            assert view.turn.parent_turn_id == (agent.seen[call - 1].turn_id if call % CALLS_PER_SESSION else None)
            if agent.has_keys:
                same = [other for other in by_session[agent.session_id(call)] if other.messages == view.messages]
                assert [other.turn.turn_id for other in same if other.turn.finish_reason] == [seen.turn_id]
