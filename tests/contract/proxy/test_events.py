"""`GET /v1/events`: who gets which changes, what a slow client loses, and when a stream ends."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Iterator

import httpx2
import pytest
from support.ledger_samples import add_session, finish
from support.migrated import migrated, writing
from support.proxies import RunningProxy
from support.waiting import WAIT_SECONDS, wait_until

from proxy.features.page import readings
from proxy.features.page.readings import Event, Events, changes_between
from proxy.metrics import Metrics
from turnwise.errors import Overloaded
from turnwise.store import keys


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readings, "READ_SECONDS", 0.01)


@contextlib.asynccontextmanager
async def listening(hub: Events, tenant: str) -> AsyncIterator[AsyncIterator[Event]]:
    async def events_of(changes: AsyncIterator[list[Event]]) -> AsyncIterator[Event]:
        async for found in changes:
            for event in found:
                yield event

    changes = hub.changes(tenant, asyncio.get_running_loop().create_future())
    async with contextlib.aclosing(changes), asyncio.timeout(WAIT_SECONDS):
        assert await anext(changes) == []
        yield events_of(changes)


@pytest.mark.usefixtures("quick")
async def test_a_listener_gets_the_changes_of_its_tenant_from_any_process_on_the_store(database):
    add_session(database, "old", tenant="mine")
    hub = Events(database, Metrics())
    async with listening(hub, "mine") as mine, listening(hub, "theirs") as theirs:
        add_session(database, "s", tenant="mine", task_id="<b>")
        add_session(database, "t", tenant="theirs")
        fields = {"session_id": "s", "task_id": "<b>", "group_id": None, "status": "open"}
        counts = {"num_turns": 1, "num_chains": 1, "num_rewards": 0}
        assert await anext(mine) == Event("session", fields | counts)
        assert (await anext(theirs)).data["session_id"] == "t"
        finish(database, "old", tenant="mine")
        while (event := await anext(mine)).data["status"] == "open":
            assert event.data["session_id"] == "old"
        assert (event.data["session_id"], event.data["status"], event.data["num_rewards"]) == ("old", "ended", 1)


@pytest.mark.usefixtures("quick")
async def test_listeners_of_a_tenant_share_a_reading(database, monkeypatch):
    monkeypatch.setattr(readings, "SHARED_SECONDS", 600.0)
    hub = Events(database, Metrics())
    async with listening(hub, "mine"):
        database.close()
        async with listening(hub, "mine"):
            pass


def test_a_listener_that_reads_too_slowly_to_see_all_new_sessions_gets_one_notice():
    sessions = {("session", str(number)): {"n": number} for number in range(201)}
    before, newest = ({key: sessions[key] for key in list(sessions)[part]} for part in (slice(1), slice(1, None)))
    found = list(changes_between(before, newest))
    assert [event.kind for event in found] == ["lost", *["session"] * 200]
    assert [event.kind for event in changes_between(newest, sessions)] == ["session"]
    assert list(changes_between(newest, {})) == []


@pytest.mark.parametrize(
    ("limit", "refusal", "is_another_refused"),
    [
        ("MAX_LISTENERS", "1 clients listen to events, which is the limit", True),
        ("MAX_TENANT_LISTENERS", "1 clients of this tenant listen", False),
    ],
)
async def test_the_number_of_listeners_is_limited_and_one_tenant_leaves_places_for_others(
    database, monkeypatch, limit, refusal, is_another_refused
):
    monkeypatch.setattr(readings, limit, 1)
    hub = Events(database, Metrics())
    async with listening(hub, "mine"):
        with pytest.raises(Overloaded, match=refusal):
            hub.listeners.check("mine")
        with pytest.raises(Overloaded) if is_another_refused else contextlib.nullcontext():
            hub.listeners.check("another")
    hub.listeners.check("mine")


class Stream:
    def __init__(self, proxy: RunningProxy, key: str = "") -> None:
        self.lines: list[str] = []
        self.is_over = threading.Event()
        self._url = f"{proxy.url}/v1/events"
        self._headers = {"authorization": f"Bearer {key}"}
        self._thread = threading.Thread(target=self._receive, daemon=True)
        self._thread.start()
        wait_until(lambda: ": listening" in self.lines, "the stream of events has begun")

    def _receive(self) -> None:
        with (
            contextlib.suppress(httpx2.TransportError),
            httpx2.stream("GET", self._url, headers=self._headers) as reply,
        ):
            self.lines += [f"{reply.status_code} {reply.headers['content-type']}"]
            for line in reply.iter_lines():
                self.lines.append(line)
        self.is_over.set()

    def sessions(self) -> Iterator[dict]:
        for before, line in zip(self.lines, self.lines[1:], strict=False):
            if before == "event: session":
                yield json.loads(line.removeprefix("data: "))


def test_a_stream_has_live_turns_and_ends_when_the_server_stops(fake_engine, start_proxy, tmp_path):
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with writing(migrated(url)) as connection:
        key = keys.create_key(connection, "mine", keys.KeyRole.ADMIN, "me")[1]
    proxy = start_proxy(fake_engine.url, "--drain-seconds", "600", database_url=url)
    stream = Stream(proxy, key)
    assert stream.lines[0].startswith("200 text/event-stream")
    with httpx2.Client(base_url=proxy.url, headers={"authorization": f"Bearer {key}"}) as http:
        chat = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
        http.post("/sessions/live/v1/chat/completions", json=chat).raise_for_status()
        wait_until(lambda: any(each["num_turns"] == 1 for each in stream.sessions()), "the turn is in the stream")
        with httpx2.stream("GET", f"{proxy.url}/v1/events", headers=dict(http.headers)):
            wait_until(lambda: "turnwise_event_listeners 2.0" in http.get("/metrics").text, "there are two listeners")
        wait_until(lambda: "turnwise_event_listeners 1.0" in http.get("/metrics").text, "one of them has left")
        assert httpx2.get(f"{proxy.url}/v1/events").status_code == 401
        other = http.post("/v1/keys", json={"role": "agent"}).raise_for_status().json()
        revoked = Stream(proxy, other["key"])
        http.post(f"/v1/keys/{other['key_id']}/revoke").raise_for_status()
        http.post("/sessions/secret/v1/chat/completions", json=chat).raise_for_status()
        assert revoked.is_over.wait(WAIT_SECONDS)
        assert "secret" not in str(revoked.lines)
    proxy.process.terminate()
    # The time to drain is for model calls; a stream does not use it.
    proxy.process.wait(WAIT_SECONDS)
    assert stream.is_over.wait(WAIT_SECONDS)
