"""Conversations whose every token is recorded between proxy and engine, while workers and writers are killed.

The recorder reads the engine's replies on the wire, so what is compared with the store comes neither from the store nor
from the engine's own lists. Conversations have tools, several choices, streams that the client cuts, and retries.
"""

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from harnesses.recorder import recording
from support.private_postgres import PrivatePostgres
from support.proxies import RunningProxy, children, is_writing_process, running_proxy
from support.waiting import wait_until
from turnwise_fake_engine import Script, running_fake_engine
from turnwise_fake_engine.ledger import SeenCall

from turnwise.store.turns import TurnView
from turnwise.types import Json, Outcome

NUM_WORKERS = 2
NUM_PLAYERS = 16
ATTEMPT_SECONDS = 60.0
PAUSE_SECONDS = 0.05
PACE_SECONDS = 0.002
KILL_EVERY = 20
"""Conversations that end between two kills."""
PROGRESS_SECONDS = 300.0
PROBE_ID = "chatcmpl-"
"""Of the calls by which a proxy checks its engine."""
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@dataclasses.dataclass(frozen=True, slots=True)
class Seen:
    session_id: str
    turn_id: str
    parent: tuple[str, list[int]] | None
    """The reply that its call extends: the id of its first choice, and the tokens of the choice that was taken. Equal
    choices, such as calls of the same tool, are the same conversation."""
    key: str | None
    """Its call's `Idempotency-Key`."""
    num_messages: int
    """Messages of its call."""
    messages: list[Json]
    """The message of each choice."""
    token_ids: list[list[int]]
    """The token ids of each choice, as the client received them."""

    def choice_id(self, index: int) -> str:
        return f"{self.turn_id}#{index}" if index else self.turn_id


@dataclasses.dataclass
class Played:
    seen: list[Seen] = dataclasses.field(default_factory=list)
    num_ended: int = 0
    """Conversations that have ended."""
    num_cut: int = 0
    retries: Counter[str] = dataclasses.field(default_factory=Counter)
    """Repeated attempts, by what ended the one before."""


class RefusedError(Exception):
    """The proxy refused a call, or ended its stream early."""


class Player:
    def __init__(self, url: str, seed: int, played: Played) -> None:
        self._url, self._seed, self._played = url, seed, played

    async def play(self, http: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
        for number in numbers:
            await self._converse(http, f"talk-{number}", random.Random(f"{self._seed} {number}"))
            self._played.num_ended += 1

    async def _converse(self, http: aiohttp.ClientSession, name: str, rng: random.Random) -> None:
        has_tools, has_keys = rng.random() < 0.4, rng.random() < 0.5
        messages: list[Json] = []
        parent: tuple[str, list[int]] | None = None
        for step in range(rng.randint(2, 4)):
            messages.append({"role": "user", "content": f"{name} asks {step}: " + "and " * rng.randint(1, 20)})
            while messages[-1]["role"] != "assistant":
                body = {"model": "fake", "messages": messages, "stream": rng.random() < 0.6, "return_token_ids": True}
                body |= {"n": rng.choice([1, 1, 1, 2, 3]), **({"tools": TOOLS} if has_tools else {})}
                key = f"{name}-{len(messages)}" if has_keys else None
                if body["stream"] and rng.random() < 0.2:
                    await self._cut(http, name, body, key, rng.randint(1, 8))
                seen = await self._complete(http, name, body, key, parent)
                chosen = rng.randrange(body["n"])
                parent = seen.turn_id, seen.token_ids[chosen]
                messages.append(seen.messages[chosen])
                called = [call["id"] for call in seen.messages[chosen].get("tool_calls") or []]
                messages += [{"role": "tool", "tool_call_id": each, "content": f"found {step}"} for each in called]

    def _post(self, http: aiohttp.ClientSession, name: str, body: Json, key: str | None) -> Any:
        headers = {"content-type": "application/json", **({"idempotency-key": key} if key else {})}
        url = f"{self._url}/sessions/{name}/v1/chat/completions"
        return http.post(url, data=orjson.dumps(body), headers=headers)

    async def _cut(self, http: aiohttp.ClientSession, name: str, body: Json, key: str | None, num_lines: int) -> None:
        self._played.num_cut += 1
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionResetError):
            async with self._post(http, name, body, key) as response:
                for _ in range(num_lines):
                    await response.content.readline()
                response.close()

    async def _complete(
        self, http: aiohttp.ClientSession, name: str, body: Json, key: str | None, parent: tuple[str, list[int]] | None
    ) -> Seen:
        while True:
            try:
                async with self._post(http, name, body, key) as response:
                    reply = await (_streamed(response) if body["stream"] else _whole(response))
                    seen = Seen(name, reply[0], parent, key, len(body["messages"]), *reply[1:])
                    self._played.seen.append(seen)
                    return seen
            except RefusedError as refusal:
                self._played.retries[str(refusal)] += 1
            except (aiohttp.ClientError, TimeoutError, ConnectionResetError) as error:
                self._played.retries[type(error).__name__] += 1
            await asyncio.sleep(PAUSE_SECONDS)


async def _whole(response: aiohttp.ClientResponse) -> tuple[str, list[Json], list[list[int]]]:
    reply = await response.json()
    if "error" in reply:
        raise RefusedError(reply["error"]["code"])
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    return reply["id"], [_message(choice["message"]) for choice in choices], [choice["token_ids"] for choice in choices]


async def _streamed(response: aiohttp.ClientResponse) -> tuple[str, list[Json], list[list[int]]]:
    """Return id, messages and token ids of a stream's choices.

    Raises:
        RefusedError: it ends with an error, or before all choices are finished.
    """
    turn_id, messages, tokens, finished = "", defaultdict(dict), defaultdict(list), set()
    if response.status != 200:
        raise RefusedError((await response.json())["error"]["code"])
    async for line in response.content:
        if not line.startswith(b"data: {"):
            continue
        chunk = orjson.loads(line[len(b"data: ") :])
        if "error" in chunk:
            raise RefusedError(chunk["error"]["code"])
        turn_id = chunk["id"]
        for choice in chunk["choices"]:
            index = choice["index"]
            _add_delta(messages[index], choice["delta"])
            tokens[index] += choice.get("token_ids") or []
            if choice["finish_reason"] is not None:
                finished.add(index)
    if not finished or finished != set(range(len(messages))):
        raise RefusedError("cut off")
    order = sorted(messages)
    return turn_id, [_message(messages[index]) for index in order], [tokens[index] for index in order]


def _add_delta(message: Json, delta: Json) -> None:
    message["content"] = (message.get("content") or "") + (delta.get("content") or "")
    calls = message.setdefault("tool_calls", [])
    for part in delta.get("tool_calls") or []:
        while len(calls) <= part["index"]:
            calls.append({"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        call, function = calls[part["index"]], part.get("function") or {}
        call["id"] = part.get("id") or call["id"]
        for field in ("name", "arguments"):
            call["function"][field] += function.get(field) or ""


def _message(message: Json) -> Json:
    kept = {"role": "assistant", "content": message.get("content") or None}
    return {**kept, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else kept


@dataclasses.dataclass
class Result:
    violations: list[str]
    summary: str


def run(database_url: str, directory: Path, *, conversations: int, seed: int) -> Result:
    """Play conversations while workers and writers are killed; then compare the store with the record."""
    played = Played()
    with (
        running_fake_engine(Script(pace_seconds=PACE_SECONDS)) as engine,
        recording(engine.url) as recorder,
        running_proxy(recorder.url, database_url, directory, "--workers", str(NUM_WORKERS)) as proxy,
    ):
        wait_until(lambda: len(proxy.workers()) == NUM_WORKERS, "the workers have started")
        players = threading.Thread(target=_play, args=(proxy.url, seed, conversations, played), daemon=True)
        players.start()
        kills = _kill_while(players, proxy, random.Random(seed), played)
        own = [call for call in recorder.calls if call.reply_id != PROBE_ID]
        found = violations(proxy.turns(), own, played)
    if played.num_ended != conversations:
        found.append(f"{conversations - played.num_ended} conversations did not end")
    summary = (
        f"{played.num_ended} recorded conversations, seed {seed}: {len(played.seen)} replies seen whole, "
        f"{played.num_cut} cut, kills {dict(kills)}, retries {dict(played.retries)}; "
        f"{len(found)} violations"
    )
    return Result(found, summary)


def _play(url: str, seed: int, conversations: int, played: Played) -> None:
    async def play() -> None:
        numbers, timeout = iter(range(conversations)), aiohttp.ClientTimeout(total=ATTEMPT_SECONDS)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
            await asyncio.gather(*(Player(url, seed, played).play(http, numbers) for _ in range(NUM_PLAYERS)))

    asyncio.run(play())


def _kill_while(players: threading.Thread, proxy: RunningProxy, rng: random.Random, played: Played) -> Counter[str]:
    """Kill a worker or a writer each time that some conversations have ended, until all have."""
    kills: Counter[str] = Counter()
    victims: dict[str, Callable[[], list[int]]] = {"worker": proxy.workers, "writer": lambda: _writers(proxy)}
    while True:
        wanted = played.num_ended + KILL_EVERY
        wait_until(
            lambda wanted=wanted: played.num_ended >= wanted or not players.is_alive(),
            f"{KILL_EVERY} more conversations have ended after {played.num_ended}; retries {played.retries}",
            PROGRESS_SECONDS,
        )
        if not players.is_alive():
            return kills
        kind = rng.choice(sorted(victims))
        if found := victims[kind]():
            with contextlib.suppress(ProcessLookupError):  # it has ended with its worker
                os.kill(rng.choice(found), signal.SIGKILL)
                kills[kind] += 1


def _writers(proxy: RunningProxy) -> list[int]:
    found = []
    for worker in proxy.workers():
        with contextlib.suppress(FileNotFoundError):  # it was killed
            found += [pid for pid in children(worker) if is_writing_process(pid)]
    return found


def violations(stored: list[TurnView], calls: list[SeenCall], played: Played) -> list[str]:
    recorded = {call.reply_id: call for call in calls}
    by_id = {view.turn.turn_id: view for view in stored}
    found = [f"the recorder saw {len(calls) - len(recorded)} calls twice"] if len(recorded) < len(calls) else []
    for view in stored:
        found += _not_as_recorded(view, recorded)
    finished: dict[tuple[str, int], set[str]] = defaultdict(set)
    for view in stored:
        if view.turn.finish_reason is not None and view.turn.outcome is Outcome.EXACT:
            finished[view.turn.session_id, len(view.messages)].add(view.turn.turn_id)
    for seen in played.seen:
        for index, tokens in enumerate(seen.token_ids):
            found += _not_as_seen(seen, index, tokens, by_id)
        ids = {seen.choice_id(index) for index in range(len(seen.token_ids))}
        if seen.key is not None and (others := finished[seen.session_id, seen.num_messages] - ids):
            found.append(f"the call with key {seen.key!r} is stored more than once: {sorted(others)}")
    return found


def _not_as_recorded(view: TurnView, recorded: dict[str, SeenCall]) -> list[str]:
    """Compare a stored turn with the engine's reply; what was cut off holds the beginning of it."""
    turn = view.turn
    kept = turn.token_ids.tolist()
    name, _, index = turn.turn_id.partition("#")
    call = recorded.get(name)
    if call is None or len(call.token_ids) <= int(index or 0):
        return [f"turn {turn.turn_id} has tokens of no recorded reply"] if kept else []
    sampled = call.token_ids[int(index or 0)]
    found = []
    if kept != sampled[: len(kept)] or (turn.finish_reason is not None and len(kept) != len(sampled)):
        found.append(f"turn {turn.turn_id} holds {kept}, the recorder saw {sampled}")
    if kept and view.prompt_token_ids.tolist() != call.prompt_token_ids:
        found.append(f"turn {turn.turn_id} has another prompt than the recorder saw")
    if len(turn.logprobs) != len(kept):
        found.append(f"turn {turn.turn_id} has {len(turn.logprobs)} logprobs of {len(kept)} tokens")
    return found


def _not_as_seen(seen: Seen, index: int, tokens: list[int], by_id: dict[str, TurnView]) -> list[str]:
    turn_id = seen.choice_id(index)
    if turn_id not in by_id:
        return [f"lost: turn {turn_id} of {seen.session_id}"]
    turn = by_id[turn_id].turn
    before = by_id.get(turn.parent_turn_id or "")
    parent = None if before is None else (before.turn.turn_id.partition("#")[0], before.turn.token_ids.tolist())
    kept = (turn.session_id, parent, turn.outcome, turn.token_ids.tolist())
    wanted = (seen.session_id, seen.parent, Outcome.EXACT, tokens)
    return [] if kept == wanted else [f"turn {turn_id} is {kept} (reason {turn.reason}), the client saw {wanted}"]


@contextlib.contextmanager
def new_database(kind: str, directory: Path) -> Iterator[str]:
    """Make an empty database of a kind; return its URL."""
    if kind == "sqlite":
        yield f"sqlite:///{directory}/turnwise.db"
        return
    server = PrivatePostgres()
    try:
        server.start()
        yield server.url(server.create_database())
    finally:
        server.close()
