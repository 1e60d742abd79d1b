"""Two proxies over one database, which know nothing of each other: a session that one ends or deletes at the other."""

from __future__ import annotations

import httpx2
from support.proxies import RunningProxy, StartProxy
from turnwise_fake_engine import RunningFakeEngine

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def call(proxy: RunningProxy, **headers: str) -> httpx2.Response:
    return httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT, headers=headers)


def ending(proxy: RunningProxy, session_id: str) -> tuple[str, str | None]:
    turn = proxy.turns(session_id)[-1].turn
    return turn.outcome.value, turn.reason


def test_a_session_that_another_proxy_ended_gets_one_turn_that_is_not_trained(
    fake_engine: RunningFakeEngine, start_proxy: StartProxy
):
    """Without the second look, all later turns of the session would be lost for training."""
    one = start_proxy(fake_engine.url)
    other = start_proxy(fake_engine.url, database_url=one.database_url)
    call(other, **{"x-session-id": "app"}).raise_for_status()
    httpx2.post(f"{one.v1}/sessions/app/end", json={}).raise_for_status()
    call(other, **{"x-session-id": "app"}).raise_for_status()
    assert ending(one, "app") == ("untrainable", "session_ended")
    later = call(other, **{"x-session-id": "app"})
    assert later.headers["x-session-id"] == "app~2"
    assert ending(one, "app~2") == ("exact", None)
