"""Which session a call belongs to, and how often the store is read to find it."""

import functools
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.in_process import in_process_proxy

from proxy.features.inferred import SessionIds
from proxy.sessions import memory
from turnwise.features import retention
from turnwise.store import sessions
from turnwise.store.database import Database
from turnwise.types import Json, Session

HELLO: Json = {"role": "user", "content": "Hello."}
SAID: Json = {"role": "assistant", "content": "Nothing that was sampled here."}
OF_CALLS = {"read_session", "_read_unknown", "newest_generation", "_read_candidates", "find"}
"""What reads the store to find the session of a call and what it continues."""


def call(http: TestClient, *messages: Json, path: str = "/v1", **headers: str) -> Any:
    body = {"model": "fake", "messages": list(messages)}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return http.post(f"{path}/chat/completions", json=body, headers=named)


def session_of(reply: Any) -> str:
    reply.raise_for_status()
    return str(reply.headers["x-session-id"])


def end(http: TestClient, session_id: str) -> None:
    http.post(f"/v1/sessions/{session_id}/end", json={}).raise_for_status()


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The reads of the store for calls, in their order."""
    found: list[str] = []
    fetch = Database.fetch

    def noted(database: Database, function: Any, *arguments: Any, **options: Any) -> Any:
        if (name := getattr(function, "__name__", "")) in OF_CALLS:
            found.append(name)
        return fetch(database, function, *arguments, **options)

    monkeypatch.setattr(Database, "fetch", noted)
    return found


def test_a_conversation_in_memory_needs_no_read_and_one_that_is_not_is_looked_for_once(tmp_path, reads):
    with in_process_proxy(tmp_path) as (http, _):
        first = call(http, HELLO)
        reads.clear()
        second = call(http, HELLO, first.json()["choices"][0]["message"], HELLO)
        assert (session_of(second), reads) == (session_of(first), [])
        other = call(http, HELLO | {"content": "Hi."}, SAID, HELLO, SAID, HELLO)
        assert (session_of(other) != session_of(first), reads) == (True, ["_read_candidates", "_read_unknown"])


@pytest.mark.parametrize("how", ["path", "key", "created"])
def test_a_call_in_an_ended_session_of_a_harness_is_refused(tmp_path, how):
    """The path or a key names it, or it was created explicitly."""
    with in_process_proxy(tmp_path) as (http, _):
        ask = functools.partial(call, http, HELLO, path="/sessions/named/v1")
        if how != "path":
            made = http.post("/v1/sessions", json={"session_id": "named"}).json()
            names = {"x_session_id": "named"} if how == "created" else {"authorization": f"Bearer {made['api_key']}"}
            ask = functools.partial(call, http, HELLO, **names)
        assert session_of(ask()) == "named"
        end(http, "named")
        refused = ask()
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_not_open")
        assert "'named' is ended; create a new one" in refused.json()["error"]["message"]


def test_an_ended_session_that_an_application_named_continues_in_a_linked_session(tmp_path, reads):
    """Each time that it has ended; each is linked to the one before. A restarted proxy asks only for the newest."""

    def again(http: TestClient) -> tuple[str, str | None]:
        session_id = session_of(call(http, HELLO, x_session_id="named"))
        continues = http.get(f"/v1/sessions/{session_id}").json()["continues"]
        end(http, session_id)
        return session_id, continues

    with in_process_proxy(tmp_path) as (http, _):
        seen = [again(http) for _ in range(3)]
    reads.clear()
    with in_process_proxy(tmp_path) as (http, _):
        seen.append(again(http))
    assert seen == [("named", None), ("named~2", "named"), ("named~3", "named~2"), ("named~4", "named~3")]
    assert reads.count("newest_generation") == 1


def test_the_memory_of_ended_sessions_is_bounded_and_the_store_has_those_that_were_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "MAX_SESSIONS", 2)
    apps: list[Any] = []
    names = ["first", "second", "third"]
    with in_process_proxy(tmp_path, wrap=lambda app: apps.append(app) or app) as (http, _):
        for name in names:
            call(http, HELLO, x_session_id=name)
            end(http, name)
            assert session_of(call(http, HELLO, x_session_id=name)) == f"{name}~2"
        assert len(apps[0]._app.state.services.sessions.cache) == 2
        again = [session_of(call(http, HELLO, x_session_id=name)) for name in names]
    assert again == ["first~2", "second~2", "third~2"]


def test_the_sessions_of_a_conversation_are_bounded_too():
    """Otherwise an evaluation that repeats one greedy conversation would fill the memory with its sessions."""
    inferred, caller = SessionIds(3), ("default", "key", 0)
    for name in ("s0", "s1", "s2", "s2"):
        inferred.add(caller, b"often", name)
    assert inferred.find(caller, b"often") == ("s0", "s1", "s2")
    inferred.add(caller, b"often", "s3")
    assert inferred.find(caller, b"often") == ("s1", "s2", "s3")
    inferred.add(caller, b"once", "s9")
    assert (inferred.find(caller, b"often"), inferred.find(caller, b"once")) == ((), ("s9",))
    assert inferred.find(("other", "key", 0), b"once") == ()


def test_a_session_that_another_proxy_has_deleted_and_created_anew_is_the_new_one(tmp_path):
    """The old one is still in this proxy's memory; no conversation finds it, and a count of tokens creates none."""
    with in_process_proxy(tmp_path) as (http, database):
        created = [http.post("/v1/sessions", json={"session_id": "named"}).json()["created_at"]]
        first = call(http, HELLO)
        told = [HELLO, first.json()["choices"][0]["message"], HELLO]
        for session_id in ("named", session_of(first)):
            retention.delete_all(database, lambda conn, it=session_id: retention.delete_session(conn, "default", it))
        with database.write() as conn:
            sessions.create_session(conn, Session(session_id="named", opened_by="api"))
        created.append(http.post("/v1/sessions", json={"session_id": "named"}).json()["created_at"])
        assert created[1] > created[0]
        assert session_of(call(http, HELLO, path="/sessions/named/v1")) == "named"
        counted = {"model": "fake", "max_tokens": 1, "messages": told}
        http.post("/v1/messages/count_tokens", json=counted).raise_for_status()
        assert [each["session_id"] for each in http.get("/v1/sessions").json()["data"]] == ["named"]
