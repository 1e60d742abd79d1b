"""A request of many megabytes is decoded in another process, with the same result, while the event loop goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import orjson
import pytest

from proxy.continuation.conversation import read_conversation
from proxy.continuation.digests import NAME, digest_history, message_digest
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.decoding_process import DecodingProcess
from proxy.dialects.known_requests import KnownRequests, MessageDigest
from turnwise.errors import InvalidRequest, ProxyUnavailable, TooLarge

CALLER = ("default", "key")
LIMITS = {"max_depth": 64, "max_containers": 10_000}
FIELDS = frozenset({NAME})
TEXT = "The quick brown fox jumps over the lazy dog. " * 373_000
"""16 MiB."""
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


async def test_decoding_sixteen_mebibytes_holds_the_loop_for_a_fraction_of_its_time(decoder):
    """The same work in the loop's thread is the measure: it decodes the request and digests its messages."""
    raw, requests = orjson.dumps(BODY), KnownRequests(10**9, decoder)
    started = time.thread_time()
    messages = orjson.loads(raw)["messages"]
    message_digest(messages[0], FIELDS)
    in_the_loop = time.thread_time() - started
    stop = asyncio.Event()
    watch = asyncio.create_task(longest_hold(stop))
    read = await requests.read(CALLER, raw, **LIMITS, digest=MessageDigest(message_digest, FIELDS))
    call = ChatCompletions().parse(read.body, max_choices=1, max_messages=10)
    call.known, call.messages_json = read.known, read.messages_json
    history = read_conversation(call, FIELDS).history
    await asyncio.sleep(0)
    stop.set()
    assert await watch < in_the_loop / 3
    assert read.body == BODY
    assert history.full == digest_history(messages, b"", FIELDS).full


async def test_digests_for_another_template_are_not_used(decoder):
    """The template may change between the decoding and the use of the digests."""
    requests = KnownRequests(10**9, decoder)
    read = await requests.read(CALLER, orjson.dumps(BODY), **LIMITS, digest=MessageDigest(message_digest, FIELDS))
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


def test_the_process_ends_with_the_proxy(decoder):
    """It sees its link closed, also where the proxy was killed."""
    link = decoder._start()
    process = decoder._process
    link.close()
    assert process.wait(60) == 0
