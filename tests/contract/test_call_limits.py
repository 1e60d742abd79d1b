"""Limits, the queue, keep-alives and the metrics of a running proxy."""

import concurrent.futures
import time

import httpx2
from prometheus_client.parser import text_string_to_metric_families
from turnwise_fake_engine import Reply, Rule

BODY = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}


def chat(url: str, **more: object) -> httpx2.Response:
    return httpx2.post(f"{url}/chat/completions", json={**BODY, **more})


def test_a_key_over_its_rate_limit_gets_a_retry_after_header(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--key-requests-per-minute", "2")
    answers = [chat(proxy.v1) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert 1 <= int(answers[2].headers["retry-after"]) <= 30


def test_calls_over_the_limit_wait_in_the_queue_and_are_all_served(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--max-concurrent-calls", "2", "--queue-seconds", "600")
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda _: chat(proxy.v1), range(12)))
    assert {answer.status_code for answer in answers} == {200}


def test_a_silent_stream_gets_keep_alive_comments_that_clients_ignore(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--stream-keep-alive-seconds", "0.05")
    fake_engine.answer(Rule(reply=Reply(text="s", pace_seconds=0.9)))
    answer = chat(proxy.v1, stream=True)
    events = [line for line in answer.text.split("\n\n") if line]
    assert events.count(": keep-alive") >= 2
    assert answer.headers["x-accel-buffering"] == "no", "servers between pass each event on at once"
    assert events[-1] == "data: [DONE]"
    data = [event for event in events if event.startswith("data: {")]
    assert len(data) + events.count(": keep-alive") + 1 == len(events)


def test_a_silent_array_of_gemini_gets_line_breaks_that_json_ignores(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--stream-keep-alive-seconds", "0.05")
    fake_engine.answer(Rule(reply=Reply(text="said", pace_seconds=0.9)))
    body = {"contents": [{"role": "user", "parts": [{"text": "Hi."}]}]}
    answer = httpx2.post(f"{proxy.url}/v1beta/models/fake:streamGenerateContent", json=body)
    assert answer.text.startswith("\n\n\n")
    texts = [part["text"] for each in answer.json() for part in each["candidates"][0]["content"]["parts"]]
    assert "".join(texts) == "said"


def test_metrics_of_the_process_its_queues_and_each_engine_are_exported(proxy, fake_engine):
    assert chat(proxy.v1).status_code == 200
    text = httpx2.get(f"{proxy.url}/metrics").text
    samples = {
        (sample.name, sample.labels.get("engine")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["turnwise_engine_head_seconds_count", fake_engine.url] == 1
    assert samples["turnwise_engine_calls", fake_engine.url] == 0
    assert samples["turnwise_queued_calls", None] == 0
    assert samples["turnwise_writer_queue", None] >= 0
    assert samples["process_resident_memory_bytes", None] > 0


def test_the_id_of_a_turn_begins_with_the_milliseconds_of_its_call(proxy):
    """So the database appends to the index of turn ids, and changes no page of it for each turn."""
    before = time.time_ns() // 1_000_000
    turn_ids = [chat(proxy.v1).json()["id"].removeprefix("chatcmpl-") for _ in range(2)]
    after = time.time_ns() // 1_000_000
    called_at = [int(turn_id[:12], 16) for turn_id in turn_ids]
    assert before <= called_at[0] <= called_at[1] <= after
    assert [len(turn_id) for turn_id in turn_ids] == [32, 32]
    assert turn_ids[0][12:] != turn_ids[1][12:]
