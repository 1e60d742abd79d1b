"""Every call is stored with exactly one outcome."""

from __future__ import annotations

import signal
import threading

import httpx2
import pytest
from support.control_plane import metric
from support.proxies import RunningProxy, StartProxy
from support.waiting import wait_until

from turnwise.fake_engine import RunningFakeEngine, running_fake_engine
from turnwise.fake_engine.script import Reply, Rule

DEADLINE_SECONDS = 30.0
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def outcomes(proxy: RunningProxy) -> list[tuple[str, str | None]]:
    return [(view.turn.outcome.value, view.turn.reason) for view in proxy.turns()]


def test_a_call_without_a_healthy_engine_is_stored_and_counted(start_proxy: StartProxy):
    with running_fake_engine() as engine:
        proxy = start_proxy(engine.url, "--engine-wait-seconds", "0")
    wait_until(lambda: httpx2.get(f"{proxy.url}/readyz").status_code != 200, "the engine is known to be gone")
    reply = httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
    assert outcomes(proxy) == [("error", "engine_unavailable")]
    assert metric(proxy, "turnwise_turns_total", outcome="error", reason="engine_unavailable") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_cut_off_by_sigterm_is_stored(
    fake_engine: RunningFakeEngine, start_proxy: StartProxy, stream: bool
):
    """The proxy cuts it off after the drain time and stores the tokens sampled until then; the client gets an error."""
    proxy = start_proxy(fake_engine.url, "--drain-seconds", "0.5")
    fake_engine.calls.clear()  # the calls of the proxy's probe
    fake_engine.answer(Rule(contains="Hello.", reply=Reply(text="word " * 500, pace_seconds=0.05)))
    seen = bytearray()

    def call() -> None:
        body = {**CHAT, "stream": stream}
        with httpx2.stream("POST", f"{proxy.v1}/chat/completions", json=body, timeout=DEADLINE_SECONDS) as reply:
            for part in reply.iter_bytes():
                seen.extend(part)

    client = threading.Thread(target=call)
    client.start()
    if stream:
        wait_until(lambda: seen.count(b"data:") > 3, "the stream has begun")
    else:
        wait_until(lambda: fake_engine.calls, "the engine has the call")
    proxy.process.send_signal(signal.SIGTERM)
    assert proxy.process.wait(DEADLINE_SECONDS) in (0, -signal.SIGTERM)
    client.join(DEADLINE_SECONDS)
    assert b"proxy_unavailable" in seen
    assert outcomes(proxy) == [("aborted", "proxy_stopped")]
    assert bool(len(proxy.turns()[0].turn.token_ids)) is stream
