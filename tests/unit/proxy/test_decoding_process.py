"""A request of many megabytes is decoded in another process, with the same result, while the event loop runs."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
import time
from collections.abc import Iterator
from typing import Any

import orjson
import pytest

from proxy.calls.capture import with_message_pieces
from proxy.calls.replays import keyed_digest
from proxy.continuation.conversation import read_conversation, read_in_slices
from proxy.continuation.digests import NAME, digest_history
from proxy.continuation.message_facts import read_messages
from proxy.dialects import registry
from proxy.dialects.base import Call, Dialect, encode_request
from proxy.dialects.chat import ChatCompletions, readable_messages
from proxy.dialects.decoding_process import DecodingProcess, FairLock
from proxy.dialects.known_requests import KnownRequests, MessageReader, digest_of
from proxy.dialects.long_calls import LongRequest, counted_call, digest_call, read_call, read_counted_call
from proxy.writer.frames import frame
from proxy.writer.process import Sampled, complete, pack
from turnwise.errors import InvalidRequest, ProxyUnavailable, TooLarge
from turnwise.store.rows import dump
from turnwise.types import Json, JsonText, Turn

CALLER = ("default", "key")
LIMITS = {"max_depth": 64, "max_containers": 20_000, "max_strings": 30_000}
FIELDS = frozenset({NAME})
TEXT = "The quick brown fox jumps over the lazy dog. " * 93_000
"""4 MiB."""
BODY = {"model": "m", "messages": [{"role": "user", "name": "kim", "content": TEXT}], "n": 1}


@pytest.fixture
def decoder() -> Iterator[DecodingProcess]:
    decoder = DecodingProcess()
    yield decoder
    decoder.close()


async def longest_hold(stop: asyncio.Event) -> float:
    """Return the most CPU time that the loop's thread spent between two rounds of the loop."""
    longest, before = 0.0, time.thread_time()
    while not stop.is_set():
        await asyncio.sleep(0)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    return longest


def bodies(num_messages: int) -> dict[str, dict[str, Any]]:
    """Return a request of 4 MiB in each format: with one message, or with many."""
    texts = [TEXT[number::num_messages] for number in range(num_messages)]
    turns = [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]
    return {
        "chat": {"model": "m", "messages": turns},
        "messages": {"max_tokens": 9, "messages": turns},
        "responses": {"model": "m", "input": turns, "instructions": "Be brief."},
        "gemini": {
            "contents": [
                {"role": "model" if number % 2 else "user", "parts": [{"text": text}]}
                for number, text in enumerate(texts)
            ]
        },
    }


def long_request(name: str) -> tuple[Dialect, LongRequest]:
    dialect = next(each for each in registry.DIALECTS if each.name == name)
    return dialect, LongRequest("default", name, dialect.routes[0].path, {"model": "m"}, {}, LIMITS, 1, 10_000)


async def read_elsewhere(decoder: DecodingProcess, name: str, raw: bytes) -> Call:
    """Return the call of a long request, as the data plane reads it."""
    reader, (dialect, request) = MessageReader(read_messages, FIELDS), long_request(name)
    if not dialect.repeats_messages:
        call, _ = await read_call(decoder, raw, request, reader)
        await digest_of(raw)
        return call
    read = await KnownRequests(10**9, decoder).read(CALLER, raw, reader=reader, **LIMITS)
    call = dialect.parse(read.body, max_choices=1, max_messages=10_000)
    call.known, call.messages_json, call.pieces = read.known, read.messages_json, read.pieces
    return call


def turn_of(call: Call) -> Sampled:
    return Sampled(Turn(turn_id="t", session_id="s", chain_id="t", messages=call.messages), [])


def stored_messages(sampled: Sampled) -> list[Json]:
    return orjson.loads(complete(pack(sampled)).turn.row["messages"])


@pytest.mark.parametrize("num_messages", [1, 4_001])
@pytest.mark.parametrize("name", ["chat", "messages", "responses", "gemini"])
async def test_four_mebibytes_hold_the_loop_for_a_fraction_of_their_time(name, num_messages, decoder):
    """Reading, digesting, and the messages to the engine and to the writer; the measure is the same in the loop."""
    raw = orjson.dumps(bodies(num_messages)[name])
    dialect, request = long_request(name)
    started = time.thread_time()
    local = request.parse(*request.decode(raw))
    history = digest_history(local.messages, b"", FIELDS)
    sent = b"".join(encode_request(local.dialect.engine_body(local, None, {})))
    whole = frame(pack(turn_of(local)))
    in_the_loop = time.thread_time() - started
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_hold(stop))
    call = await read_elsewhere(decoder, name, raw)
    await asyncio.sleep(0)
    conversation = await read_in_slices(call, FIELDS)
    await asyncio.sleep(0)
    pieces = encode_request(dialect.engine_body(call, None, {}))
    await asyncio.sleep(0)
    (light,) = await with_message_pieces([turn_of(call)], call)
    await asyncio.sleep(0)
    frame(pack(light))
    stop.set()
    assert await watch < in_the_loop / 3
    assert conversation.history.full == history.full
    assert orjson.loads(b"".join(pieces)) == orjson.loads(sent)
    assert [message for piece in light.messages for message in pickle.loads(piece)] == local.messages
    assert sum(map(len, frame(pack(light)))) < 1.1 * sum(map(len, whole))
    assert (call.sampling, call.tools, call.notes, call.stream) == (
        local.sampling,
        local.tools,
        local.notes,
        local.stream,
    )


async def test_a_short_request_of_many_strings_is_decoded_elsewhere(decoder):
    """A body of 700 KiB may hold 50,000 keys, which take 30 ms."""
    few, many = (
        orjson.dumps({**bodies(4_001)["chat"], "messages": [], "x": {f"k{number}": 1 for number in range(size)}})
        for size in (8_000, 9_000)
    )
    await KnownRequests(10**9, decoder).read(CALLER, few, **LIMITS)
    assert decoder._process is None
    await KnownRequests(10**9, decoder).read(CALLER, many, **LIMITS)
    assert decoder._process is not None


async def test_only_the_new_messages_of_a_long_request_are_pickled(decoder):
    """A turn that extends another stores what follows; here 2,000 of 4,001 messages, from the middle of a piece on."""
    call = await read_elsewhere(decoder, "chat", orjson.dumps(bodies(4_001)["chat"]))
    sampled = turn_of(call)
    sampled = sampled._replace(turn=dataclasses.replace(sampled.turn, messages=call.messages[2_001:]))
    (light,) = await with_message_pieces([sampled], call)
    assert stored_messages(light) == call.messages[2_001:]
    call.messages = call.messages[:]  # a conversation that was put together, so that the pieces are of other messages
    (light,) = await with_message_pieces([sampled], call)
    assert stored_messages(light) == call.messages[2_001:]


async def test_a_long_request_under_a_key_has_the_digest_of_a_short_one(decoder):
    raw = orjson.dumps(bodies(3)["responses"])
    _, request = long_request("responses")
    local = request.parse(*request.decode(raw))
    assert await digest_call(decoder, raw, request, keyed_digest) == keyed_digest(local)


async def test_digests_for_another_template_are_not_used(decoder):
    """The template may change between the decoding and the use of the digests."""
    requests = KnownRequests(10**9, decoder)
    read = await requests.read(CALLER, orjson.dumps(BODY), **LIMITS, reader=MessageReader(read_messages, FIELDS))
    call = ChatCompletions().parse(read.body, max_choices=1, max_messages=10)
    call.known, call.messages_json = read.known, read.messages_json
    assert read_conversation(call).history.full == digest_history(BODY["messages"], b"").full


async def test_a_long_request_is_refused_as_a_short_one_is(decoder):
    requests = KnownRequests(10**9, decoder)
    with pytest.raises(InvalidRequest, match="not JSON"):
        await requests.read(CALLER, orjson.dumps(TEXT)[:-1], **LIMITS)
    with pytest.raises(InvalidRequest, match="must be a JSON object"):
        await requests.read(CALLER, orjson.dumps(TEXT), **LIMITS)
    with pytest.raises(TooLarge, match="deeper than 64"):
        await requests.read(CALLER, b'{"messages":' + b"[" * 2**21 + b"]" * 2**21 + b"}", **LIMITS)


async def test_a_killed_process_fails_one_request_and_is_replaced(decoder):
    raw, requests = orjson.dumps(BODY), KnownRequests(10**9, decoder)
    await requests.read(CALLER, raw, **LIMITS)
    decoder._process.kill()
    decoder._process.wait()
    with pytest.raises(ProxyUnavailable, match="nothing was sampled"):
        await requests.read(("default", "other"), raw, **LIMITS)
    assert (await requests.read(("default", "other"), raw, **LIMITS)).body == BODY


async def test_a_job_after_a_cancelled_one_gets_its_own_result(decoder):
    """The answer to the cancelled job is not taken for that of the next, which may be of another tenant."""
    cancelled = asyncio.create_task(decoder.do("default", bytes.upper, TEXT.encode()))
    while decoder._link is None:  # noqa: ASYNC110  a thread sets it
        await asyncio.sleep(0)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await decoder.do("default", bytes.upper, b"next") == b"NEXT"


async def test_tenants_take_turns_for_the_process(decoder):
    """Otherwise one tenant's many long requests delay everybody's; a request whose caller left is not decoded."""
    done = []

    async def decode(tenant: str, number: int) -> None:
        await decoder.do(tenant, bytes.upper, b"long")
        done.append(f"{tenant}{number}")

    asked = [("a", 1), ("a", 2), ("a", 3), ("a", 4), ("a", 5), ("b", 1), ("b", 2), ("c", 1)]
    jobs = [asyncio.create_task(decode(*each)) for each in asked]
    await asyncio.sleep(0)
    jobs[asked.index(("a", 3))].cancel()
    await asyncio.wait(jobs)
    assert done == ["a1", "a2", "b1", "c1", "a4", "b2", "a5"]


async def test_a_lock_that_is_granted_to_a_cancelled_caller_is_passed_on():
    lock = FairLock()
    await lock.acquire("a")
    cancelled, next_one = (asyncio.create_task(lock.acquire(tenant)) for tenant in "bc")
    await asyncio.sleep(0)
    lock.release()
    cancelled.cancel()
    async with asyncio.timeout(60):
        await next_one
    assert cancelled.cancelled()


def test_the_process_ends_with_the_proxy(decoder):
    """It sees its link closed, also where the proxy was killed."""
    link = decoder._start()
    process = decoder._process
    link.close()
    assert process.wait(60) == 0


async def test_the_long_strings_of_one_message_are_read_one_by_one(decoder, monkeypatch):
    """An item of 24 MiB in one pickle holds the interpreter's lock for 10 ms. The same for the other fields."""
    images = [{"type": "image_url", "image_url": {"url": letter * (2 * 2**20)}} for letter in "abc"]
    body = {"messages": [{"role": "user", "content": images}], "documents": [{"text": TEXT}, {"text": TEXT[1:]}]}
    lengths, loads = [], pickle.loads
    monkeypatch.setattr(pickle, "loads", lambda data: lengths.append(len(data)) or loads(data))
    read = await KnownRequests(10**9, decoder).read(CALLER, orjson.dumps(body), **LIMITS)
    assert read.body == body
    assert max(lengths) < 2**20
    assert [message for _, piece in read.pieces for message in loads(piece)] == body["messages"]


async def test_a_message_with_many_strings_and_many_fields_beside_the_messages_are_refused(decoder):
    """Each is decoded and encoded as a whole: 51,000 keys take 8 ms."""
    parts = [{"type": "text", "text": "x"}] * 2_000
    requests = KnownRequests(10**9, decoder, max_part_strings=7_900)
    allowed = {"messages": [{"role": "user", "content": parts[:1_900]}] * 2, "tools": []}
    assert (await requests.read(CALLER, orjson.dumps(allowed), **LIMITS)).body == allowed
    for refused, where in (
        ({**allowed, "messages": [{"role": "user", "content": parts}, *allowed["messages"]]}, "in a message"),
        ({**allowed, "metadata": {f"k{number}": 1 for number in range(8_000)}}, "in the fields beside its messages"),
    ):
        with pytest.raises(TooLarge, match=where):
            await requests.read(("default", "other"), orjson.dumps(refused), **LIMITS)


@pytest.mark.parametrize("prompt", [list(range(200_000)), "text " * 250_000, ["a", "b"]])
async def test_the_prompt_of_long_completions_is_never_decoded_here(prompt, decoder):
    """The engine and the store get its JSON."""
    raw = orjson.dumps({"prompt": prompt, "metadata": {"x": " " * 2**20}, "n": 2})
    dialect, request = long_request("completions")
    request = request._replace(max_choices=2)
    call, _ = await read_call(decoder, raw, request, MessageReader(read_messages, FIELDS))
    local = request.parse(*request.decode(raw))
    assert isinstance(call.body["prompt"], JsonText)
    assert call.num_choices == local.num_choices == (4 if prompt == ["a", "b"] else 2)
    sent = orjson.loads(b"".join(encode_request(dialect.engine_body(call, None, {}))))
    assert sent == dialect.engine_body(local, None, {})
    assert orjson.loads(dump(call.sampling)) == local.sampling


async def test_a_long_request_to_count_tokens_is_translated_elsewhere(decoder):
    raw = orjson.dumps({**bodies(3)["messages"], "system": "Be brief.", "metadata": {"user_id": "kim"}})
    dialect, _ = long_request("messages")
    request = long_request("messages")[1]._replace(path="/v1/messages/count_tokens")
    call = await read_counted_call(decoder, raw, request, MessageReader(read_messages, FIELDS))
    local = counted_call(dialect, orjson.loads(raw), 10_000)
    assert (call.messages, call.body, call.original) == (local.messages, local.body, local.original)
    assert b"".join(readable_messages(call).pieces) == orjson.dumps(local.messages)
