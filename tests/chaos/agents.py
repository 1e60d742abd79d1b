"""Agents of two tenants that play groups of sessions and repeat each request until it is answered.

Both tenants use the same names of sessions, groups, tasks and keys. Each call's text names its tenant, session and
number, and the engine echoes it: a reply that crosses sessions or tenants is seen at once.
"""

import asyncio
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import orjson
from support.streamed_replies import StreamedReply

DEADLINE_SECONDS = 30.0
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


class Observed:
    """Observations of all agents; shared by their tasks, which run in one thread."""

    def __init__(self) -> None:
        self.replies: list[CompleteReply] = []
        self.step_rewards: list[tuple[str, str, str]] = []
        """Tenant, session and turn of each reward that was acknowledged."""
        self.refusals: Counter[tuple[int, str]] = Counter()
        self.broken_connections = 0
        self.seconds: list[float] = []
        """Duration of each attempt, in the order of their ends."""
        self.violations: list[str] = []


class Agent:
    def __init__(
        self, tenant: str, number: int, key: str, urls: list[str], observed: Observed, think_seconds: float
    ) -> None:
        self._tenant, self._number = tenant, number
        self._think_seconds = think_seconds
        self._headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        self._urls = urls
        self._observed = observed
        self._num_attempts = number

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
        await self._post(http, "/v1/sessions", opening, f"{name}-open")
        messages: list[dict[str, str]] = []
        parent = None
        for number in range(CALLS_PER_SESSION):
            await asyncio.sleep(self._think_seconds)
            messages.append({"role": "user", "content": f"{self._tenant} {name} call {number}"})
            seen = await self._sample(http, name, messages, parent, f"{name}-{number}")
            messages.append({"role": "assistant", "content": seen.text})
            parent = seen.turn_id
        reward = {"turn_id": parent, "value": 0.5, "name": "step"}
        await self._post(http, "/v1/rewards", reward, f"{name}-reward")
        self._observed.step_rewards.append((self._tenant, name, str(parent)))
        await self._post(http, f"/v1/sessions/{name}/end", {"reward": float(run)}, f"{name}-end")

    async def _sample(
        self, http: aiohttp.ClientSession, name: str, messages: list[dict[str, str]], parent: str | None, key: str
    ) -> CompleteReply:
        streams = self._number % 2 == 0
        body = {"model": "fake", "messages": messages, "stream": streams}
        path = f"/sessions/{name}/v1/chat/completions"
        turn_id, text = await self._repeat(http, path, body, key, self._streamed if streams else _complete)
        seen = CompleteReply(self._tenant, name, turn_id, parent, text)
        if text != messages[-1]["content"]:
            self._observed.violations.append(f"{messages[-1]['content']!r} was answered by {text!r}")
        self._observed.replies.append(seen)
        return seen

    async def _post(self, http: aiohttp.ClientSession, path: str, body: dict[str, Any], key: str) -> None:
        await self._repeat(http, path, body, key, _anything)

    async def _repeat(
        self, http: aiohttp.ClientSession, path: str, body: dict[str, Any], key: str, read: Callable[..., Any]
    ) -> Any:
        """Repeat a request, alternating between the proxies, until its answer is complete."""
        while True:
            self._num_attempts += 1
            url = self._urls[self._num_attempts % len(self._urls)] + path
            started = time.monotonic()
            try:
                answer = await self._attempt(http, url, body, key, read)
            except TimeoutError:
                self._observed.violations.append(f"{url} was not answered in {DEADLINE_SECONDS} s")
                answer = None
            except (aiohttp.ClientError, ConnectionResetError):
                self._observed.broken_connections += 1
                answer = None
            self._observed.seconds.append(time.monotonic() - started)
            if answer is not None:
                return answer
            await asyncio.sleep(PAUSE_SECONDS)

    async def _attempt(
        self, http: aiohttp.ClientSession, url: str, body: dict[str, Any], key: str, read: Callable[..., Any]
    ) -> Any:
        headers = {**self._headers, "idempotency-key": key}
        async with http.post(url, data=orjson.dumps(body), headers=headers) as response:
            if response.status < 400:
                return await read(response)
            raw = await response.read()
        self._refused(response.status, raw, url)
        return None

    def _refused(self, status: int, raw: bytes, url: str) -> None:
        try:
            error = orjson.loads(raw)["error"]
        except (orjson.JSONDecodeError, KeyError):
            self._observed.violations.append(f"{url} answered {status} without an error: {raw[:200]!r}")
            return
        self._observed.refusals[status, error["code"]] += 1
        if status not in PERMITTED:
            self._observed.violations.append(f"{url} answered {status}: {error['message']}")

    async def _streamed(self, response: aiohttp.ClientResponse) -> tuple[str, str] | None:
        reply = StreamedReply()
        await reply.read(response)
        if reply.error_code is not None:
            self._observed.refusals[200, reply.error_code] += 1
        elif reply.has_ended and not reply.is_complete:
            self._observed.violations.append(f"a stream of {response.url} ended without its finish or an error")
        return (reply.turn_id, reply.text) if reply.is_complete else None


async def _complete(response: aiohttp.ClientResponse) -> tuple[str, str]:
    reply = await response.json()
    return reply["id"], reply["choices"][0]["message"]["content"]


async def _anything(response: aiohttp.ClientResponse) -> Any:
    return await response.json()


class Crowd:
    def __init__(
        self, keys: dict[str, str], urls: list[str], agents_per_tenant: int, *, think_seconds: float = 0.0
    ) -> None:
        self.observed = Observed()
        self._agents = [
            Agent(tenant, number, key, urls, self.observed, think_seconds)
            for tenant, key in keys.items()
            for number in range(agents_per_tenant)
        ]
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="agents", daemon=True)
        self._thread.start()

    @property
    def num_agents(self) -> int:
        return len(self._agents)

    def is_playing(self) -> bool:
        return self._thread.is_alive()

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    def _run(self) -> None:
        self._loop.run_until_complete(self._play())
        self._loop.close()

    async def _play(self) -> None:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*(agent.play(http, self._stop) for agent in self._agents))
