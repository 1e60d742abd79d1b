"""A long request is decoded from where an earlier one ends, with the same result as when it is decoded whole."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import orjson
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from proxy.continuation.conversation import call_has_media, read_conversation
from proxy.continuation.outline import Outliner, Outlines
from proxy.dialects.base import Call, encode_request
from proxy.dialects.chat import ChatCompletions, messages_after
from proxy.dialects.decoding_process import DecodingProcess
from proxy.dialects.known_requests import DIGEST_BYTES, KnownRequests, ReadRequest
from proxy.dialects.object_sizes import json_bytes
from proxy.dialects.repeated_messages import RepeatedMessages
from turnwise.errors import InvalidRequest

CALLER = ("default", "key")
LIMITS = {"max_depth": 64, "max_containers": 10_000}
USER = {"role": "user", "content": 'Hello "there" ]}, 誰'}
REPLY = {
    "role": "assistant",
    "content": "Hi.",
    "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
}
NEXT = {"role": "tool", "tool_call_id": "1", "content": "[1, 2]"}


def read(requests: KnownRequests, raw: bytes, caller: tuple[str, str] = CALLER) -> ReadRequest:
    return asyncio.run(requests.read(caller, raw, **LIMITS))


def test_only_bytes_after_the_known_messages_are_decoded():
    """Reading the new messages decodes nothing of the earlier request; reading one of its messages decodes them."""
    requests = KnownRequests(10**6, DecodingProcess())
    first = read(requests, orjson.dumps({"model": "m", "messages": [USER], "tools": [1]}))
    second = read(requests, orjson.dumps({"model": "m", "messages": [USER, REPLY, NEXT], "tools": [2]}))
    messages = second.body["messages"]
    assert (messages[1], messages[-1], messages[1:], messages[3:1], len(messages)) == (
        REPLY,
        NEXT,
        [REPLY, NEXT],
        [],
        3,
    )
    assert not messages.is_decoded
    assert messages[0] == USER
    assert messages.is_decoded
    assert first.body == {"model": "m", "messages": [USER], "tools": [1]}
    assert second.body == {"model": "m", "messages": [USER, REPLY, NEXT], "tools": [2]}
    third = read(requests, orjson.dumps({"model": "m", "messages": [USER, REPLY, NEXT]}))
    assert third.body == {"model": "m", "messages": [USER, REPLY, NEXT]}


def test_a_request_with_a_message_that_is_no_object_is_decoded_whole_each_time():
    """So each is refused in the same way, also one that extends it."""
    requests = KnownRequests(10**6, DecodingProcess())
    for messages in ([1, USER], [1, USER], [1, USER, REPLY]):
        found = read(requests, orjson.dumps({"messages": messages}))
        assert (found.body["messages"], found.known) == (messages, None)
        with pytest.raises(InvalidRequest, match="must be a list of objects"):
            ChatCompletions().parse(found.body, max_choices=1, max_messages=10)


def test_messages_without_outlines_are_counted_as_a_whole():
    """The outline of a text with a mark has the whole text; it is made after the request is counted."""
    requests, outliner = KnownRequests(10**9, DecodingProcess()), Outliner(["</think>"])
    messages = [{"role": "user", "content": "</think>" + "x" * 100_000}]
    for _ in range(3):
        messages = [*messages, REPLY, {"role": "user", "content": "</think>" + "y" * 50_000}]
        found = read(requests, orjson.dumps({"messages": messages}))
        assert found.known is not None
        outlines = Outlines() if found.known.outlines is None else found.known.outlines
        outliner.shortened(found.body["messages"], len(messages), outlines)
        found.known.outlines, num_outlined = outlines, sum(map(json_bytes, outlines.messages.values()))
        assert num_outlined <= requests.num_bytes <= num_outlined + 10_000


def test_messages_that_take_long_to_decode_are_kept_until_they_have_outlines():
    """100,000 empty lists take 5.6 MB of memory and 0.3 MB of text. Without outlines they are decoded elsewhere."""
    decoder = DecodingProcess()
    requests, dense = KnownRequests(10**9, decoder), {"role": "user", "content": [[]] * 100_000}

    async def play() -> None:
        for messages in ([dense], [dense, REPLY, NEXT], [dense, REPLY, NEXT, USER]):
            raw = orjson.dumps({"messages": messages})
            found = await requests.read(CALLER, raw, max_depth=64, max_containers=10**6)
            assert found.known is not None
            assert found.body == {"messages": messages}
            assert found.known.kept is found.body["messages"]
        found.known.outlines = Outlines()
        Outliner(()).shortened(messages, len(messages), found.known.outlines)
        for new in ([REPLY], [REPLY, NEXT]):
            grown = [*messages, *new]
            found = await requests.read(CALLER, orjson.dumps({"messages": grown}), max_depth=64, max_containers=10**6)
            assert found.known is not None
            assert found.known.kept is None
            Outliner(()).shortened(grown, len(grown), found.known.outlines)
        repeated = found.body["messages"]
        assert (repeated.is_decoded, repeated[-1]) == (False, NEXT)
        await repeated.load()
        assert repeated.is_decoded
        assert repeated == [*messages, REPLY, NEXT]

    try:
        asyncio.run(play())
    finally:
        decoder.close()


class CountedJobs(DecodingProcess):
    """Counts the jobs of the other process."""

    num_jobs = 0

    async def do(self, *arguments: Any, **options: Any) -> Any:
        self.num_jobs += 1
        return await super().do(*arguments, **options)


def test_messages_that_grow_past_the_limit_without_outlines_are_decoded_elsewhere_once():
    """Each message takes 1.1 MB of memory, so five are above 5 MiB."""
    decoder = CountedJobs()
    requests, dense = KnownRequests(10**9, decoder), {"role": "user", "content": [[]] * 20_000}

    async def play() -> list[bool]:
        kept = []
        for num_messages in range(1, 9):
            body = {"messages": [dense] * num_messages}
            found = await requests.read(CALLER, orjson.dumps(body), max_depth=64, max_containers=10**6)
            assert found.known is not None
            assert found.body == body
            kept.append(found.known.kept is found.body["messages"])
        return kept

    try:
        assert asyncio.run(play()) == [False] * 4 + [True] * 4
        assert decoder.num_jobs == 1
    finally:
        decoder.close()


@pytest.mark.parametrize(
    "later",
    [
        {"model": "m", "messages": [{**USER, "content": "other"}, REPLY]},
        {"model": "n", "messages": [USER, REPLY]},
        {"messages": [USER, REPLY], "model": "m"},
    ],
    ids=["an edited message", "another field before", "another order"],
)
def test_a_request_with_other_bytes_before_is_decoded_whole(later: dict[str, Any]):
    requests = KnownRequests(10**6, DecodingProcess())
    first = read(requests, orjson.dumps({"model": "m", "messages": [USER]}))
    found = read(requests, orjson.dumps(later))
    assert found.body == later
    assert isinstance(first.body["messages"], list)
    assert isinstance(found.body["messages"], list)


def test_the_engine_gets_the_bytes_that_the_client_sent():
    """The messages are not encoded again."""
    requests = KnownRequests(10**6, DecodingProcess())
    for messages in ([USER], [USER, REPLY, NEXT]):
        raw = json.dumps({"messages": messages}, ensure_ascii=False, separators=(" ,", ":  ")).encode()
        found = read(requests, raw)
        assert found.messages_json is not None
        assert b"%b]}" % found.messages_json == raw.removeprefix(b'{"messages":  ')


def test_the_requests_of_another_caller_are_not_used():
    requests = KnownRequests(10**6, DecodingProcess())
    read(requests, orjson.dumps({"messages": [USER]}))
    other = read(requests, orjson.dumps({"messages": [USER, REPLY]}), ("default", "other"))
    assert isinstance(other.body["messages"], list)


def memory_of(message: dict[str, Any]) -> int:
    """Return the memory that a request of one message counts."""
    requests = KnownRequests(10**6, DecodingProcess())
    read(requests, orjson.dumps({"messages": [message]}))
    return requests.num_bytes


def test_requests_above_the_limit_are_dropped_and_the_least_recent_first():
    raw = [orjson.dumps({"messages": [{"role": "user", "content": str(number) * 100}]}) for number in range(3)]
    num_bytes = memory_of({"role": "user", "content": "1" * 100})
    requests = KnownRequests(2 * num_bytes, DecodingProcess())
    for each in raw:
        read(requests, each)
    again = [read(requests, each).body["messages"] for each in reversed(raw)]
    assert [isinstance(messages, RepeatedMessages) for messages in again] == [True, True, False]


@pytest.mark.parametrize(
    "tail",
    [
        b",]}",
        b',{"role":"user"}',
        b",5]}",
        b"x]}",
        b'],"messages":[]}',
        b',{"role":"user"}],"messages":[{}]}',
        b"]",
        b"",
    ],
)
def test_an_error_after_the_known_messages_is_answered_as_in_a_whole_request(tail: bytes):
    """An error, or the last of two fields of one name."""
    raw = orjson.dumps({"model": "m", "messages": [USER]})
    requests = KnownRequests(10**6, DecodingProcess())
    read(requests, raw)
    later = raw[:-2] + tail
    try:
        whole = orjson.loads(later)
    except orjson.JSONDecodeError:
        with pytest.raises(InvalidRequest, match="not JSON"):
            read(requests, later)
    else:
        assert read(requests, later).body == whole


PICTURE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
BROKEN = {"role": "assistant", "tool_calls": [{"id": "2", "function": {"name": "f", "arguments": '{"a": '}}]}
OTHERS = [{"role": "system", "content": ""}, {"role": "assistant", "content": "x", "messages": [{}]}]
MESSAGE = st.sampled_from([USER, REPLY, NEXT, PICTURE, BROKEN, *OTHERS])
FIELDS = st.dictionaries(
    st.sampled_from(["model", "metadata", "tools", "n"]),
    st.sampled_from(["a", 1, {"messages": [USER]}, [], None]),
    max_size=3,
)


def engine_body(call: Call) -> Any:
    """Return the engine's request as the engine decodes it."""
    return orjson.loads(b"".join(encode_request(call.dialect.engine_body(call, None, {"n": 1}))))


@given(
    edits=st.lists(st.tuples(st.integers(0, 8), st.lists(MESSAGE, max_size=4)), min_size=2, max_size=6),
    head=FIELDS,
    tails=st.lists(FIELDS, min_size=6, max_size=6),
    spaced=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_random_conversations_give_the_same_result_as_decoded_whole(edits, head, tails, spaced):
    """They grow, are cut, edited and compacted; some clients put spaces between.

    The body, the digest, the history, whether there is media, and the engine's request agree.
    """
    requests, messages = KnownRequests(10**6, DecodingProcess()), []
    for (kept, added), tail, has_spaces in zip(edits, tails, spaced, strict=False):
        messages = [*messages[: len(messages) if kept > 3 else kept], *added]
        body = {**head, "messages": messages, **{field: value for field, value in tail.items() if field not in head}}
        raw = json.dumps(body, separators=(", ", ": ") if has_spaces else (",", ":"), ensure_ascii=False).encode()
        found = read(requests, raw)
        assert found.body == body
        assert found.digest == blake3(raw).digest(DIGEST_BYTES)
        call = Call(
            dialect=ChatCompletions(),
            body=found.body,
            messages=found.body["messages"],
            stream=False,
            num_choices=1,
            wants_logprobs=False,
            wants_token_ids=False,
        )
        fresh, has_media, sent = read_conversation(call).history, call_has_media(call), engine_body(call)
        call.known, call.messages_json = found.known, found.messages_json
        assert (call_has_media(call), engine_body(call)) == (has_media, sent)
        whole, omitted = (
            read_conversation(dataclasses.replace(call, messages=messages, known=None)),
            range(len(messages)),
        )
        known = read_conversation(call)
        assert (known.history.replies, known.call_ids()) == (whole.history.replies, whole.call_ids())
        assert [messages_after(call.messages, each, found.known) for each in omitted] == [
            messages_after(messages, each) for each in omitted
        ]
        continued = known.history
        assert (continued.full, continued.messages, continued.dialogue) == (fresh.full, fresh.messages, fresh.dialogue)
        assert continued.extended(REPLY)[:3] == fresh.extended(REPLY)[:3]
