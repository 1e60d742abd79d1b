"""Agents that play groups of sessions and repeat each request until it is answered, in a thread of their own.

All tenants use the same names of sessions, groups, tasks and keys. Each call's text names its tenant, session and
number, and the engine echoes it: a reply that crosses sessions or tenants is seen at once. Half of the agents stream,
and some of these cut off a call first; some others ask for two choices.
"""

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import aiohttp
import orjson
from support.waiting import WAIT_SECONDS, wait_until

DEADLINE_SECONDS = WAIT_SECONDS
"""Limit of one attempt: the proxies' own deadlines are 3 and 5 seconds, and no fault lasts longer than 9."""
PAUSE_SECONDS = 0.05
GROUP_SIZE = 2
CALLS_PER_SESSION = 3
PERMITTED = {409, 429, 502, 503, 504}
"""Statuses of errors that a fault may cause."""


@dataclasses.dataclass(frozen=True, slots=True)
class CompleteReply:
    tenant: str
    session_id: str
    turn_id: str
    parent_turn_id: str | None
    text: str
    asked: str
    has_key: bool = True
    """Whether its call had an `Idempotency-Key`, so that it must not be sampled twice."""


class Observed:
    """Observations of all agents; shared by their tasks, which run in one thread."""

    def __init__(self) -> None:
        self.replies: list[CompleteReply] = []
        self.step_rewards: list[tuple[str, str, str]] = []
        """Tenant, session and turn of each reward that was acknowledged."""
        self.refusals: Counter[tuple[int, str]] = Counter()
        self.messages: dict[tuple[int, str], str] = {}
        """Of the first refusal of each kind."""
        self.broken_connections = 0
        self.attempts: list[tuple[float, float]] = []
        """Start and end of each attempt on the monotonic clock, in the order of their ends; seconds."""
        self.violations: list[str] = []


class Agent:
    def __init__(self, tenant: str, number: int, key: str, crowd: "Crowd") -> None:
        self._tenant, self._number, self._crowd = tenant, number, crowd
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._observed = crowd.observed
        self._num_attempts = number
        self._streams = number % 2 == 0
        # A reply of one proxy may be stored after the repetition at another one: all calls of several have keys.
        self._has_keys = len(crowd.urls) > 1 or number % 4 < 2
        self._cuts = crowd.is_varied and number % 4 == 0
        # Two choices make two chains, and trainers of several proxies' sessions count each turn of a chain.
        self._num_choices = 2 if crowd.is_varied and number % 4 == 1 and len(crowd.urls) == 1 else 1

    async def play(self, http: aiohttp.ClientSession, stop: asyncio.Event) -> None:
        """Play until stopped; a started group is finished."""
        group = 0
        while not stop.is_set():
            for run in range(GROUP_SIZE):
                await self._play_session(http, f"agent{self._number}-group{group}", run)
            group += 1

    async def _play_session(self, http: aiohttp.ClientSession, group_id: str, run: int) -> None:
        name = f"{group_id}-run{run}"
        opening = {"session_id": name, "group_id": group_id, "group_size": GROUP_SIZE, "task_id": group_id, "run": run}
        await self._repeat(http, "/v1/sessions", opening, f"{name}-open", _json)
        messages: list[dict[str, str]] = []
        parent = None
        for number in range(CALLS_PER_SESSION):
            await asyncio.sleep(self._crowd.think_seconds)
            messages.append({"role": "user", "content": f"{self._tenant} {name} call {number}"})
            seen = await self._sample(http, name, messages, parent, f"{name}-{number}")
            messages.append({"role": "assistant", "content": seen.text})
            parent = seen.turn_id
        reward = {"turn_id": parent, "value": 0.5, "name": "step"}
        await self._repeat(http, "/v1/rewards", reward, f"{name}-reward", _json)
        self._observed.step_rewards.append((self._tenant, name, str(parent)))
        await self._repeat(http, f"/v1/sessions/{name}/end", {"reward": float(run)}, f"{name}-end", _json)

    async def _sample(
        self, http: aiohttp.ClientSession, name: str, messages: list[dict[str, str]], parent: str | None, key: str
    ) -> CompleteReply:
        body = {"model": "fake", "messages": messages, "stream": self._streams, "n": self._num_choices}
        body |= self._crowd.fields
        path = f"/sessions/{name}/v1/chat/completions"
        if self._cuts:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionResetError):
                await self._attempt(http, self._crowd.urls[0] + path, body, key, _cut)
        read = self._streamed if self._streams else _complete
        turn_id, text = await self._repeat(http, path, body, key if self._has_keys else None, read)
        asked = messages[-1]["content"]
        seen = CompleteReply(self._tenant, name, turn_id, parent, text, asked, self._has_keys)
        if not self._crowd.fields and text != asked:
            self._observed.violations.append(f"{asked!r} was answered by {text!r}")
        self._observed.replies.append(seen)
        return seen

    async def _repeat(
        self,
        http: aiohttp.ClientSession,
        path: str,
        body: dict[str, Any],
        key: str | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[Any]],
    ) -> Any:
        """Repeat a request, alternating between the proxies, until its answer is complete."""
        while True:
            await self._crowd.going.wait()
            self._num_attempts += 1
            url = self._crowd.urls[self._num_attempts % len(self._crowd.urls)] + path
            started = time.monotonic()
            answer = None
            try:
                answer = await self._attempt(http, url, body, key, read)
            except TimeoutError:
                self._observed.violations.append(f"{url} was not answered in {DEADLINE_SECONDS} s")
            except (aiohttp.ClientError, ConnectionResetError):
                self._observed.broken_connections += 1
            self._observed.attempts.append((started, time.monotonic()))
            if answer is not None:
                return answer
            await asyncio.sleep(PAUSE_SECONDS)

    async def _attempt(
        self,
        http: aiohttp.ClientSession,
        url: str,
        body: dict[str, Any],
        key: str | None,
        read: Callable[[aiohttp.ClientResponse], Awaitable[Any]],
    ) -> Any:
        headers = self._headers if key is None else {**self._headers, "idempotency-key": key}
        async with http.post(url, data=orjson.dumps(body), headers=headers) as response:
            if response.status < 400:
                return await read(response)
            self._refused(response.status, await response.read(), url)
        return None

    def _refused(self, status: int, raw: bytes, url: str) -> None:
        try:
            error = orjson.loads(raw)["error"]
        except (orjson.JSONDecodeError, KeyError):
            self._observed.violations.append(f"{url} answered {status} without an error: {raw[:200]!r}")
            return
        self._observed.refusals[status, error["code"]] += 1
        self._observed.messages.setdefault((status, error["code"]), error["message"])
        if status not in PERMITTED:
            self._observed.violations.append(f"{url} answered {status}: {error['message']}")

    async def _streamed(self, response: aiohttp.ClientResponse) -> tuple[str, str] | None:
        """Return the reply if its finish was received and no error, whether or not the stream ended properly."""
        turn_id, text, is_complete = "", "", False
        with contextlib.suppress(aiohttp.ClientError, ConnectionResetError):
            async for line in response.content:
                if not line.startswith(b"data: {"):
                    continue
                chunk = orjson.loads(line[len(b"data: ") :])
                if "error" in chunk:
                    self._observed.refusals[200, chunk["error"]["code"]] += 1
                    return None
                for choice in chunk["choices"]:
                    turn_id = chunk["id"]
                    text += choice["delta"].get("content") or ""
                    is_complete = is_complete or choice["finish_reason"] is not None
            if not is_complete:
                self._observed.violations.append(f"a stream of {response.url} ended without its finish or an error")
        return (turn_id, text) if is_complete else None


async def _complete(response: aiohttp.ClientResponse) -> tuple[str, str]:
    reply = await response.json()
    return reply["id"], reply["choices"][0]["message"]["content"]


async def _json(response: aiohttp.ClientResponse) -> Any:
    return await response.json()


async def _cut(response: aiohttp.ClientResponse) -> None:
    for _ in range(3):
        await response.content.readline()
    response.close()


class Crowd:
    """Plays on `going`; the calls of agents that are not varied are neither cut nor of two choices."""

    def __init__(
        self,
        keys: dict[str, str],
        urls: list[str],
        agents_per_tenant: int,
        *,
        think_seconds: float = 0.0,
        is_varied: bool = True,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.fields = fields or {}
        """What requests to engines have that are no stand-ins, and do not echo what they are asked."""
        self.observed = Observed()
        self.urls, self.think_seconds, self.is_varied = urls, think_seconds, is_varied
        self.going = asyncio.Event()
        self._agents = [
            Agent(tenant, number, key, self) for tenant, key in keys.items() for number in range(agents_per_tenant)
        ]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._playing = self._loop.create_task(self._play())
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    @property
    def num_agents(self) -> int:
        return len(self._agents)

    def go(self) -> None:
        self._loop.call_soon_threadsafe(self.going.set)

    def hold(self) -> None:
        self._loop.call_soon_threadsafe(self.going.clear)

    def wait_for(self, count: int) -> None:
        """Wait for so many further replies."""
        wanted = len(self.observed.replies) + count
        wait_until(lambda: len(self.observed.replies) >= wanted, "the agents get further replies")

    def is_playing(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def finish(self) -> None:
        """Stop, and wait until all started groups are finished."""
        self.stop()
        self.join(WAIT_SECONDS)
        assert not self.is_playing()

    def close(self) -> None:
        """End at once."""
        with contextlib.suppress(RuntimeError):  # they have finished
            self._loop.call_soon_threadsafe(self._playing.cancel)
        self.join(WAIT_SECONDS)

    def _run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._playing)
        self._loop.close()

    async def _play(self) -> None:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*(agent.play(http, self._stop) for agent in self._agents))


@contextlib.contextmanager
def playing(url: str, num_agents: int, *, is_varied: bool = True) -> Iterator[Crowd]:
    """Let agents play at a proxy without keys until the block ends; they wait until `go`."""
    crowd = Crowd({"default": "any"}, [url], num_agents, is_varied=is_varied)
    try:
        yield crowd
    finally:
        crowd.close()
