"""One tenant forks, deletes, sends huge bodies and revokes keys, while 16 clients of another tenant make calls.

No call of the clients waits for the end of a request of the other tenant, and each of their replies is stored once. The
99th percentile of their calls is only printed, because it depends on the machine.
"""

import contextlib
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx2
import pytest
from chaos import invariants
from chaos.agents import Crowd, Observed
from support.commands import warm_commands
from support.ledger_samples import make_turn
from support.ports import free_port
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.store import keys, sessions, turns
from turnwise.store.database import Database
from turnwise.types import Session

NUM_CLIENTS = 16
SECONDS = 15.0
"""How long the clients are measured, alone and beside the other tenant."""
LAST = ("deleted session", "refused body", "revoked key")
"""The last answer of each kind of request."""
OVERTAKEN = ("fork", "deletion", "huge prompt")
"""Requests that take longer than a call of the clients."""
THINK_SECONDS = 0.1
LONG_TURNS = 600
TURN_BYTES = 8_192
HUGE = "huge"
HUGE_BYTES = 2**20
REFUSED_BYTES = 24 * 2**20


class Neighbour:
    """The tenant that storms: each of its threads repeats one kind of request until the tenant is deleted."""

    def __init__(self, url: str, key: str, turn_id: str, clients: Observed) -> None:
        self.counts: Counter[str] = Counter()
        """Requests that were answered, by their kind."""
        self.overtaken: Counter[str] = Counter()
        """Those during which a call of the clients began and ended."""
        self._clients = clients
        self.failures: list[str] = []
        self._url, self._turn_id = url, turn_id
        self._headers = {"authorization": f"Bearer {key}"}
        self._stop = threading.Event()
        kinds: list[Callable[[httpx2.Client, int], None]] = [self._fork, self._fork, self._send_huge, self._revoke]
        self._threads = [
            threading.Thread(target=self._repeat, args=(kind, number)) for number, kind in enumerate(kinds)
        ]

    @contextlib.contextmanager
    def storming(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(WAIT_SECONDS)

    def _repeat(self, kind: Callable[[httpx2.Client, int], None], thread: int) -> None:
        number = thread
        with httpx2.Client(base_url=self._url, headers=self._headers) as http:
            while not self._stop.is_set():
                try:
                    kind(http, number)
                except (httpx2.HTTPError, AssertionError) as error:
                    self.failures.append(repr(error))
                number += len(self._threads)

    def _expect(self, ask: Callable[[], httpx2.Response], status: int, kind: str) -> None:
        before, started = len(self._clients.attempts), time.monotonic()
        answer = ask()
        self.overtaken[kind] += any(begin > started for begin, _ in self._clients.attempts[before:])
        assert answer.status_code == status, f"{kind} was answered {answer.status_code}: {answer.text[:200]}"
        self.counts[kind] += 1

    def _fork(self, http: httpx2.Client, number: int) -> None:
        name = f"fork-{number}"
        self._expect(lambda: http.post(f"/v1/turns/{self._turn_id}/fork", json={"session_id": name}), 200, "fork")
        self._expect(lambda: http.delete(f"/v1/sessions/{name}"), 200, "deletion")
        self._expect(lambda: http.get(f"/v1/sessions/{name}"), 404, "deleted session")

    def _send_huge(self, http: httpx2.Client, number: int) -> None:
        """Make a call with a huge prompt, and one with a string that is too long."""
        path = f"/sessions/huge-{number}/v1/chat/completions"
        text = f"{HUGE} {number} " * (HUGE_BYTES // len(f"{HUGE} {number} "))
        body = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": text}]}
        self._expect(lambda: http.post(path, json=body), 200, "huge prompt")
        self._expect(lambda: http.post(path, content=b'{"messages": "' + b"x" * REFUSED_BYTES), 413, "refused body")

    def _revoke(self, http: httpx2.Client, number: int) -> None:
        made = http.post("/v1/keys", json={"name": f"key-{number}"}).raise_for_status().json()
        headers = {"authorization": f"Bearer {made['key']}"}
        body = {"model": "fake", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}]}
        self._expect(lambda: http.post("/v1/chat/completions", json=body, headers=headers), 200, "call with a key")
        self._expect(lambda: http.post(f"/v1/keys/{made['key_id']}/revoke"), 200, "revocation")
        self._expect(lambda: http.post("/v1/chat/completions", json=body, headers=headers), 401, "revoked key")


@contextlib.contextmanager
def engine_process(directory: Path) -> Iterator[str]:
    """Run a fake engine as a process of its own, so that it shares no interpreter with the clients."""
    script = directory / "script.json"
    # A short reply: the engine would need seconds to repeat a huge message.
    rules = [{"contains": HUGE, "reply": {"text": "that is long"}}]
    script.write_text(json.dumps({"max_model_len": 4 * HUGE_BYTES, "rules": rules}))
    port = free_port()
    arguments = ("fake-engine", "--port", str(port), "--script", str(script))
    process = warm_commands().start(arguments, log=directory / "engine.log", cwd=directory, environment={})
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()


def add_long_session(database: Database, tenant: str) -> str:
    """Store a session with a long chain; return its last turn."""
    turn = None
    with database.write() as connection:
        sessions.create_session(connection, Session(session_id="long", tenant=tenant))
        for number in range(1, LONG_TURNS + 1):
            messages = [{"role": "user", "content": f"{number} " * (TURN_BYTES // len(f"{number} "))}]
            turn = make_turn(f"t{number}", turn, session_id="long", tenant=tenant, messages=messages)
            turns.append_turns(connection, [turn])
    return turn.turn_id


def percentile(attempts: list[tuple[float, float]]) -> float:
    return statistics.quantiles((end - start for start, end in attempts), n=100)[98]


@pytest.mark.slow
def test_a_tenants_storm_neither_delays_nor_loses_another_tenants_calls(database, database_url, tmp_path):
    with database.write() as connection:
        key = keys.create_key(connection, "calm", keys.KeyRole.AGENT, "")[1]
        admin = keys.create_key(connection, "storm", keys.KeyRole.ADMIN, "")[1]
    last_turn = add_long_session(database, "storm")
    with engine_process(tmp_path) as engine_url, running_proxy(engine_url, database_url, tmp_path) as proxy:
        crowd = Crowd({"calm": key}, [proxy.url], NUM_CLIENTS, think_seconds=THINK_SECONDS, is_varied=False)
        observed = crowd.observed
        neighbour = Neighbour(proxy.url, admin, last_turn, observed)
        crowd.go()
        try:
            wait_until(lambda: len(observed.attempts) > 10 * NUM_CLIENTS, "the clients have warmed up")
            first = len(observed.attempts)
            time.sleep(SECONDS)  # how long is measured
            alone = observed.attempts[first:]
            with neighbour.storming():
                first = len(observed.attempts)
                started = time.monotonic()
                wait_until(
                    lambda: time.monotonic() > started + SECONDS and min(neighbour.counts[kind] for kind in LAST) >= 2,
                    "each request of the other tenant was answered twice",
                )
                wait_until(lambda: all(neighbour.overtaken[kind] for kind in OVERTAKEN), "calls overtake each request")
                whole = {"authorization": f"Bearer {admin}"}
                httpx2.delete(f"{proxy.v1}/tenant", headers=whole).raise_for_status()
                beside = observed.attempts[first:]
        finally:
            crowd.stop()
            crowd.join(WAIT_SECONDS)
        wait_until(lambda: not crowd.is_playing(), "the clients have ended")
    print(f"alone {percentile(alone):.3f} s of {len(alone)}, beside {percentile(beside):.3f} s of {len(beside)}")
    print(dict(neighbour.counts), dict(neighbour.overtaken), neighbour.failures[:3])
    assert not observed.refusals
    assert not observed.violations
    stored = [(tenant, view) for tenant, view in invariants.stored_turns(database) if tenant == "calm"]
    assert not invariants.not_stored_once(observed.replies, stored)
