"""Which sessions are idle, as the proxy's sweep finds them."""

import datetime
import time

import pytest
from fastapi.testclient import TestClient
from support.in_process import in_process_proxy
from support.waiting import wait_until

from proxy import sweeper
from turnwise.types import utc_now

HOUR = datetime.timedelta(hours=1)


def call(http: TestClient, session_id: str) -> None:
    body = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
    http.post(f"/sessions/{session_id}/v1/chat/completions", json=body).raise_for_status()


def wait_for_a_sweep(http: TestClient) -> None:
    """Delete a session, which wakes the sweep, and wait until the next one has begun."""
    closed = sweeper.Sweeper._close_idle
    seen: list[str] = []

    async def counted(self: sweeper.Sweeper, *arguments: object) -> None:
        await closed(self, *arguments)
        seen.append(str(arguments[-1]))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sweeper.Sweeper, "_close_idle", counted)
        call(http, "deleted")
        http.delete("/v1/sessions/deleted").raise_for_status()
        wait_until(lambda: "expired" in seen, "idle sessions are looked for")


def test_a_corrected_clock_expires_no_running_conversation(tmp_path, monkeypatch):
    """The clock was two hours behind, and the limit is one hour: the conversation went on a moment ago."""
    with in_process_proxy(tmp_path, session_idle_seconds=HOUR.total_seconds()) as (http, _):
        wait_for_a_sweep(http)
        call(http, "running")
        monkeypatch.setattr(sweeper, "utc_now", lambda: utc_now() + 2 * HOUR)
        wait_for_a_sweep(http)
        assert http.get("/v1/sessions/running").json()["status"] == "open"


def test_a_session_without_activity_expires_whatever_the_clock_was_before(tmp_path, monkeypatch):
    """Two hours have passed on both clocks."""
    with in_process_proxy(tmp_path, session_idle_seconds=HOUR.total_seconds()) as (http, _):
        call(http, "idle")
        monkeypatch.setattr(sweeper, "utc_now", lambda: utc_now() + 2 * HOUR)
        monkeypatch.setattr("turnwise.store.database.monotonic", lambda: time.monotonic() + 2 * HOUR.total_seconds())
        wait_for_a_sweep(http)
        assert http.get("/v1/sessions/idle").json()["status"] == "expired"


def test_an_unexpected_error_in_a_sweep_does_not_end_the_sweeps(tmp_path, monkeypatch, caplog):
    with in_process_proxy(tmp_path) as (http, _):
        with monkeypatch.context() as patched:
            patched.setattr(sweeper, "utc_now", lambda: None)
            call(http, "other")
            http.delete("/v1/sessions/other").raise_for_status()
            wait_until(lambda: "a sweep failed unexpectedly" in caplog.text, "the sweep has failed")
        wait_for_a_sweep(http)
    assert "Traceback" in caplog.text
