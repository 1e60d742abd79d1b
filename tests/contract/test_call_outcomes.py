"""Every call is stored with exactly one outcome."""

import contextlib
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.control_plane import metric
from support.in_process import in_process_proxy
from support.ports import free_port
from support.proxies import ProxyAndEngine, RunningProxy, running_proxy
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Fault, FaultKind, Reply, Rule, running_fake_engine

from proxy.engines.engine import Engine
from proxy.engines.http_client import Answer
from turnwise.errors import EngineUnavailable
from turnwise.processes.supervisor import is_ready
from turnwise.types import Outcome

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def outcomes(proxy: RunningProxy) -> list[tuple[str, str | None]]:
    return [(view.turn.outcome.value, view.turn.reason) for view in proxy.turns()]


def test_a_call_without_a_healthy_engine_is_stored_and_counted(start_proxy):
    with running_fake_engine() as engine:
        proxy = start_proxy(engine.url, "--engine-wait-seconds", "0")
    wait_until(lambda: httpx2.get(f"{proxy.url}/readyz").status_code != 200, "the engine is known to be gone")
    reply = httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_unavailable")
    assert outcomes(proxy) == [("error", "engine_unavailable")]
    assert metric(proxy, "turnwise_turns_total", outcome="error", reason="engine_unavailable") == 1


@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_cut_off_by_sigterm_is_stored(fake_engine, start_proxy, stream):
    """The proxy cuts it off after the drain time and stores the tokens sampled until then; the client gets an error."""
    proxy = start_proxy(fake_engine.url, "--drain-seconds", "0.5")
    fake_engine.calls.clear()  # the calls of the proxy's probe
    fake_engine.fail_next(Fault(kind=FaultKind.HANG_STREAM if stream else FaultKind.HANG, after_chunks=5))
    seen = bytearray()

    def call() -> None:
        body = {**CHAT, "stream": stream}
        with httpx2.stream("POST", f"{proxy.v1}/chat/completions", json=body) as reply:
            for part in reply.iter_bytes():
                seen.extend(part)

    client = threading.Thread(target=call)
    client.start()
    if stream:
        wait_until(lambda: seen.count(b"data:") > 3, "the stream has begun")
    else:
        wait_until(lambda: fake_engine.calls, "the engine has the call")
    proxy.process.send_signal(signal.SIGTERM)
    assert proxy.process.wait(WAIT_SECONDS) == 0
    client.join(WAIT_SECONDS)
    assert b"proxy_unavailable" in seen
    assert outcomes(proxy) == [("aborted", "proxy_stopped")]
    assert bool(len(proxy.turns()[0].turn.token_ids)) is stream


def test_a_call_that_arrives_before_the_first_engine_waits_for_it_and_stays_on_its_chain(tmp_path):
    """A restarted proxy learns the chat template from its first engine; a call that comes earlier waits for that."""
    port, proxy_port, database_url = free_port(), free_port(), f"sqlite:///{tmp_path}/turnwise.db"
    url, proxy_url = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{proxy_port}"
    chat = "/sessions/s/v1/chat/completions"
    with running_fake_engine(port=port), running_proxy(url, database_url, tmp_path) as proxy:
        reply = httpx2.post(proxy.url + chat, json=CHAT).json()["choices"][0]["message"]
    messages = [*CHAT["messages"], reply, {"role": "user", "content": "And now?"}]

    def is_listening() -> bool:
        return is_ready(f"{proxy_url}/healthz")

    def call() -> int:
        wait_until(is_listening, "the proxy listens")
        return httpx2.post(proxy_url + chat, json={**CHAT, "messages": messages}).status_code

    with contextlib.ExitStack() as engine, ThreadPoolExecutor() as threads:

        def start_engine() -> None:
            wait_until(is_listening, "the proxy listens")
            assert not threading.Event().wait(0.5)  # time for the call to arrive; if it comes later the test is void
            engine.enter_context(running_fake_engine(port=port))

        called, started = threads.submit(call), threads.submit(start_engine)
        with running_proxy(url, database_url, tmp_path, port=proxy_port) as proxy:
            started.result()
            assert called.result() == 200
            first, second = (view.turn for view in proxy.turns("s"))
    assert (second.outcome, second.reason) == (Outcome.EXACT, None)
    assert (second.parent_turn_id, second.chain_id) == (first.turn_id, first.chain_id)


def converse(directory: Path, *calls: dict[str, Any], **session: Any) -> list[dict[str, Any]]:
    """Play a conversation with these fields in its calls, one after the other; return its turns."""
    messages = list(CHAT["messages"])
    with in_process_proxy(directory, engine_check="strict") as (http, _):
        wait_until(lambda: http.get("/readyz").status_code == 200, "the proxy is ready")
        http.post("/v1/sessions", json={"session_id": "s", **session}).raise_for_status()
        for fields in calls:
            asked = {**CHAT, "messages": messages, **fields}
            reply = http.post("/sessions/s/v1/chat/completions", json=asked).raise_for_status().json()
            messages += [reply["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        return list(http.get("/v1/sessions/s/turns").json()["data"])


def test_a_client_that_varies_what_its_session_pins_extends_its_turns(tmp_path):
    """Pinned arguments of the template replace the call's before its conversation is compared with stored ones."""
    pinned = {"chat_template_kwargs": {"enable_thinking": False}}
    varied = ({"enable_thinking": True}, {"enable_thinking": False, "date": "today"}, {})
    turns = converse(tmp_path, *({"chat_template_kwargs": own} for own in varied), sampling=pinned)
    assert [(turn["outcome"], turn["reason"]) for turn in turns] == [("exact", None)] * 3
    assert [turn["parent_turn_id"] for turn in turns[1:]] == [turn["turn_id"] for turn in turns[:-1]]


@pytest.mark.parametrize(("stream", "first"), [(True, 2), (False, 0)])
def test_a_reload_before_the_first_token_shows_in_the_versions_of_a_turn(tmp_path, monkeypatch, stream, first):
    """The first token of a whole reply is not seen, so its first version is the one at its admission."""

    async def sample_after_reload(engine: Engine, *arguments: Any) -> Answer:
        engine.apply_label("2")
        return await sample(engine, *arguments)

    sample = Engine.sample
    monkeypatch.setattr(Engine, "sample", sample_after_reload)
    with in_process_proxy(tmp_path) as (http, _):
        http.post("/sessions/s/v1/chat/completions", json={**CHAT, "stream": stream}).raise_for_status()
        (turn,) = http.get("/v1/sessions/s/turns").json()["data"]
    assert (turn["policy_version_first"], turn["policy_version_last"]) == (first, 2)


def test_a_call_that_fails_is_stored_with_the_version_that_its_engine_had_at_the_end(tmp_path, monkeypatch):
    async def fail_after_reload(engine: Engine, *_: Any) -> None:
        engine.apply_label("2")
        raise EngineUnavailable("the engine has ended")

    monkeypatch.setattr(Engine, "sample", fail_after_reload)
    with in_process_proxy(tmp_path) as (http, _):
        assert http.post("/sessions/s/v1/chat/completions", json=CHAT).status_code == 503
        (turn,) = http.get("/v1/sessions/s/turns").json()["data"]
    assert (turn["outcome"], turn["policy_version_first"], turn["policy_version_last"]) == ("error", 2, 2)


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_over_the_limit_of_bytes_is_cut_off_stored_and_counted(fake_engine, start_proxy, stream):
    """What a stream sampled until then is stored."""
    proxy = start_proxy(fake_engine.url, "--max-reply-bytes", "20000")
    fake_engine.answer(Rule(contains="Hello.", reply=Reply(text="word " * 1_000, pace_seconds=0.002 if stream else 0)))
    reply = httpx2.post(f"{proxy.v1}/chat/completions", json={**CHAT, "stream": stream, "max_tokens": 2_000})
    assert "engine_reply_too_long" in reply.text
    assert "a smaller `top_logprobs`, or raise `max_reply_bytes`" in reply.text
    assert reply.status_code == (200 if stream else 502)
    outcome = "aborted" if stream else "error"
    assert outcomes(proxy) == [(outcome, "engine_reply_too_long")]
    assert bool(len(proxy.turns()[0].turn.token_ids)) is stream
    assert metric(proxy, "turnwise_turns_total", outcome=outcome, reason="engine_reply_too_long") == 1


def test_a_whole_reply_without_a_finish_reason_is_stored_and_a_retry_with_its_key_samples_again(
    fake_engine, start_proxy
):
    """Also where the proxy keeps no answers: what is stored under a key can be repeated."""
    proxy = start_proxy(fake_engine.url, "--cache-bytes", "0")
    fake_engine.answer(Rule(contains="Hello.", reply=Reply(text="word").model_copy(update={"finish_reason": None})))
    replies = [
        httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT, headers={"idempotency-key": "k"}) for _ in range(2)
    ]
    assert [reply.status_code for reply in replies] == [200, 200]
    assert len({reply.json()["id"] for reply in replies}) == 2


def test_a_truncated_prompt_is_not_repeated_by_a_call_that_asks_for_the_whole_conversation(tmp_path):
    turns = converse(tmp_path, {}, {"truncate_prompt_tokens": 3}, {}, {})
    assert [turn["reason"] for turn in turns] == [None, "truncated_prompt", "truncated_prompt", None]
    assert [turn["parent_turn_id"] for turn in turns] == [None, None, None, turns[2]["turn_id"]]


@pytest.mark.parametrize("stream", [True, False])
def test_a_reply_of_a_deleted_session_is_not_stored_in_another_one_of_its_name(fake_engine, start_proxy, stream):
    proxy = start_proxy(fake_engine.url)
    fake_engine.calls.clear()
    httpx2.post(f"{fake_engine.url}/pause?mode=keep").raise_for_status()
    with ThreadPoolExecutor() as threads:
        body = {**CHAT, "stream": stream}
        called = threads.submit(httpx2.post, f"{proxy.session_v1('s')}/chat/completions", json=body)
        wait_until(lambda: fake_engine.calls, "the engine has the call")
        httpx2.delete(f"{proxy.v1}/sessions/s").raise_for_status()
        httpx2.post(f"{proxy.v1}/sessions", json={"session_id": "s"}).raise_for_status()
        httpx2.post(f"{fake_engine.url}/resume").raise_for_status()
        assert "session 's' was deleted, so this reply is not stored; retry" in called.result().text
        if not stream:
            assert (called.result().status_code, called.result().headers["x-should-retry"]) == (404, "true")
    assert outcomes(proxy) == []
    assert metric(proxy, "turnwise_turns_total", outcome="error", reason="not_stored") == 1


def test_a_stream_that_ends_within_an_event_is_aborted_although_its_choice_has_finished(tmp_path, monkeypatch):
    original = Answer.next_part

    async def cut_off(answer: Answer) -> bytes:
        data = await original(answer)
        return data[: data.index(b"[DONE]") + 3] if b"[DONE]" in data else data

    with in_process_proxy(tmp_path) as (http, _):
        monkeypatch.setattr(Answer, "next_part", cut_off)
        assert "engine_unavailable" in http.post("/sessions/s/v1/chat/completions", json={**CHAT, "stream": True}).text
        (turn,) = http.get("/v1/sessions/s/turns").json()["data"]
        assert (turn["outcome"], turn["reason"], turn["finish_reason"]) == ("aborted", "engine_broke_off", "stop")


SOUND = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


def ask(proxy: RunningProxy, session_id: str, **fields: Any) -> httpx2.Response:
    asked = {"messages": [{"role": "user", "content": "Hello there"}], **fields}
    reply = httpx2.post(f"{proxy.session_v1(session_id)}/chat/completions", json=asked)
    assert reply.status_code == 200, reply.text
    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("reason", ["abort", "error", "repetition"])
def test_a_reply_that_the_engine_cut_off_is_untrainable(proxy, shared_engine, session_id, reason, *, stream):
    shared_engine.answer(Rule(reply=Reply(text="One two", finish_reason=reason)))
    ask(proxy, session_id, stream=stream)
    (view,) = proxy.turns(session_id)
    assert (view.turn.outcome, view.turn.reason) == (Outcome.UNTRAINABLE, f"engine_{reason}")


def test_beam_search_and_media_are_untrainable(proxy, shared_engine, session_id):
    assert shared_engine.url
    ask(proxy, session_id, use_beam_search=True)
    ask(proxy, session_id, messages=[{"role": "user", "content": [{"type": "text", "text": "Look."}, SOUND]}])
    ask(proxy, session_id)
    ended = [(view.turn.outcome, view.turn.reason) for view in proxy.turns(session_id)]
    assert ended == [(Outcome.UNTRAINABLE, "beam_search"), (Outcome.UNTRAINABLE, "media"), (Outcome.EXACT, None)]


def test_fields_that_control_the_engine_are_removed_and_counted(proxy, shared_engine, session_id):
    steering = {"kv_transfer_params": {"prompt_token_ids": [1]}, "vllm_xargs": {"a": 1}, "priority": -5}
    pinned = {"session_id": session_id, "sampling": {"min_p": 0.5}}
    httpx2.post(f"{proxy.v1}/sessions", json=pinned).raise_for_status()
    ask(proxy, session_id, **steering, top_k=3)
    sent = shared_engine.calls[-1].body
    assert not {"kv_transfer_params", "priority"} & sent.keys()
    assert "a" not in sent["vllm_xargs"], "what the proxy itself asks of the plug-in replaces the client's"
    assert (sent["top_k"], sent["min_p"]) == (3, 0.5)
    httpx2.post(f"{proxy.v1}/completions", json={"prompt": "x", "max_tokens": 1, **steering}).raise_for_status()
    assert not steering.keys() & shared_engine.calls[-1].body.keys()
    metrics = httpx2.get(f"{proxy.url}/metrics").text
    assert 'turnwise_dropped_fields_total{field="kv_transfer_params"} 2.0' in metrics


def test_a_turn_that_the_trainer_cannot_train_says_so_before_its_batch(proxy, shared_engine, session_id):
    """The same parameters are counted by the trainer as `num_turns_left_out_greedy` afterwards."""
    assert shared_engine.url
    ask(proxy, session_id, temperature=0)
    ask(proxy, session_id)
    listed = httpx2.get(f"{proxy.v1}/sessions/{session_id}/turns").raise_for_status().json()["data"]
    assert [turn["not_trained"] for turn in listed] == ["temperature 0", None]
    ended = httpx2.post(f"{proxy.v1}/sessions/{session_id}/end", json={"reward": 1.0}).raise_for_status().json()
    assert "1 of 2 turns are not trained: temperature 0. Only `sft`," in ended["training_note"]
    findings = httpx2.get(f"{proxy.v1}/doctor").raise_for_status().json()["data"]
    (sampling,) = [finding for finding in findings if finding["check"] == "sampling"]
    assert sampling["verdict"] == "warn"
    assert "turns are not trained: temperature 0" in sampling["text"]
