"""What is captured of a stream, and what the client gets, do not depend on how it is cut."""

import copy
import dataclasses
import gc
import json
import weakref
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Send
from support.conversations import new_chain

from proxy.calls.capture import EventBuffer, Running, take_events
from proxy.dialects.base import Captured, Dialect, event
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.logprobs import read_logprobs
from proxy.engines.engine import Engine, Lane
from proxy.features.formats.gemini import Gemini
from proxy.features.formats.messages import Messages
from proxy.features.formats.responses import Responses
from proxy.routes.calls import ReplySender
from proxy.writer.frames import Link, frame
from turnwise.types import Json

TRAPS = [
    '"},"logprobs":{',
    '},"finish_reason":null,"token_ids":[',
    "]}]}\n\n",
    'data: {"choices":[',
    "\\",
    '"',
    "ü\u2028\x00",
]
MODEL = "inside"
PROMPT_IDS = [1, 22, 333]
TEXTS = st.text(max_size=5) | st.sampled_from(TRAPS)
HEAD = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": MODEL}


def chunk(delta: Json, logprobs: Json | None = None, finish_reason: str | None = None, **known: Any) -> Json:
    """Return a chunk with vLLM's order of fields; `rest` has the fields after its choices."""
    rest = known.pop("rest", {})
    choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason, **known}
    return {**HEAD, "choices": [choice], **rest}


def logprobs_of(token_ids: list[int]) -> Json:
    entry: Json = {"token": TRAPS[0] + TRAPS[1], "bytes": None, "top_logprobs": []}
    return {"content": [{**entry, "logprob": -token / 8} for token in token_ids]}


@st.composite
def text_chunks(draw: st.DrawFn) -> Json:
    ids = draw(st.lists(st.integers(0, 200_000), max_size=3))
    field = draw(st.sampled_from(["content", "content", "content", "reasoning"]))
    delta: Json = {field: draw(TEXTS)}
    arguments = {"content": None, "tool_calls": [{"index": 0, "function": {"arguments": draw(TEXTS)}}]}
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 1}}
    return draw(
        st.sampled_from(
            [
                *[chunk(delta, logprobs_of(ids), token_ids=ids)] * 6,
                chunk({}, logprobs_of(ids), token_ids=ids),
                chunk(delta, None, token_ids=ids),
                chunk(delta, logprobs_of(ids), token_ids=ids, rest=usage),
                chunk(delta, logprobs_of(ids)),
                chunk({**delta, "refusal": None}, logprobs_of(ids), token_ids=ids),
                chunk(arguments, logprobs_of(ids), token_ids=ids),
            ]
        )
    )


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    opening = chunk({"role": "assistant", "content": ""}, rest={"prompt_token_ids": PROMPT_IDS})
    last = chunk({"content": draw(TEXTS)}, logprobs_of([7]), "stop", stop_reason=None, token_ids=[7])
    usage = {**HEAD, "choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 9}}
    body = draw(st.lists(text_chunks(), max_size=12))
    if draw(st.booleans()):  # continuous_usage_stats
        body = [{**each, "usage": {"prompt_tokens": 3, "details": {"cached_tokens": 1}}} for each in body]
    error: Json = {"error": {"message": "m", "code": 500}}
    if draw(st.booleans()):
        body.insert(draw(st.integers(0, len(body))), error)
    ending = draw(st.sampled_from([[last], [last, usage], [last, error], []]))
    separators = draw(st.sampled_from([(",", ":")] * 5 + [(", ", ": ")]))
    ascii_only = draw(st.booleans())
    events = [
        b"data: " + json.dumps(each, separators=separators, ensure_ascii=ascii_only).encode(errors="replace") + b"\n\n"
        for each in [opening, *body, *ending]
    ]
    for at in draw(st.lists(st.integers(0, len(events)), max_size=2)):
        events.insert(at, b": keep-alive\n\n")
    if ending:
        events.append(b"data: [DONE]\n\n")
    return [event.replace(b"\n", b"\r\n") for event in events] if draw(st.booleans()) else events


def running(dialect: Dialect, body: Json) -> tuple[Running, Lane]:
    engine = Engine("http://127.0.0.1:9", timeout_seconds=1.0)
    engine.model = MODEL
    return Running(call=dialect.parse(body), place=new_chain()), Lane(engine)


def captured(state: Running) -> Json:
    found = {each.name: copy.deepcopy(getattr(state, each.name)) for each in dataclasses.fields(Captured)}
    found["choices"] = {index: dataclasses.asdict(choice) for index, choice in state.choices.items()}
    for choice in found["choices"].values():
        choice["logprobs"] = read_logprobs(choice["logprobs"])
    return found


QUESTION = {"model": "outside", "stream": True, "messages": [{"role": "user", "content": "Hi."}]}
CALLS: list[tuple[type[Dialect], Json]] = [
    (ChatCompletions, QUESTION),
    (ChatCompletions, {**QUESTION, "model": MODEL}),
    (ChatCompletions, {**QUESTION, "logprobs": True}),
    (ChatCompletions, {**QUESTION, "return_token_ids": True}),
    (ChatCompletions, {**QUESTION, "logprobs": True, "return_token_ids": True}),
    (ChatCompletions, {**QUESTION, "include_reasoning": False}),
    (ChatCompletions, {**QUESTION, "n": 2}),
    (Messages, {**QUESTION, "max_tokens": 9}),
    (Responses, {"model": "outside", "stream": True, "input": "Hi.", "store": False}),
    (Gemini, {"model": "outside", "stream": True, "contents": [{"role": "user", "parts": [{"text": "Hi."}]}]}),
]


@pytest.mark.parametrize(("dialect", "body"), CALLS)
@given(events=streams(), cuts=st.lists(st.integers(1, 900), max_size=12))
def test_a_stream_gives_the_same_reply_however_it_is_cut(
    dialect: type[Dialect], body: Json, events: list[bytes], cuts: list[int]
) -> None:
    """The expected reply is that of events which arrive one by one."""
    plain, lane = running(dialect(), body)
    expected = b"".join(take_events(EventBuffer().feed(event), plain, lane) for event in events)
    cut, lane = running(dialect(), body)
    buffer, stream, found = EventBuffer(), b"".join(events), b""
    for size in [*cuts, len(stream)]:
        part, stream = stream[:size], stream[size:]
        found += take_events(buffer.feed(part), cut, lane)
    assert found == expected
    assert captured(cut) == captured(plain)
    assert (cut.first_token_at is None) == (plain.first_token_at is None)
    assert not b"".join(buffer.pending)


@pytest.mark.parametrize(("dialect", "body"), CALLS[-3:])
@pytest.mark.parametrize("alt", ["", "sse"])
def test_an_engines_error_is_the_end_of_a_stream(dialect, body, alt):
    """vLLM refuses the parameters of a stream in its first event, and then sends its usual end."""
    state, lane = running(dialect(), body | {"alt": alt})
    refusal = b'{"error":{"message":"top_p must be in (0, 1]","type":"BadRequestError","param":"top_p","code":400}}'
    found = take_events([refusal, b"[DONE]"], state, lane).decode()
    assert found.count("top_p must be in (0, 1]") == 1
    if dialect is Responses:  # its clients read no stream that does not begin
        assert [line[7:] for line in found.splitlines() if line.startswith("event: ")] == [
            *("response.created", "response.in_progress", "response.failed")
        ]
    else:
        assert found.count("data: ") == (0 if dialect is Gemini and not alt else 1)
    if dialect is Gemini and not alt:
        assert [each["error"]["code"] for each in json.loads(found)] == [400]


def test_the_tokens_of_thoughts_are_counted_apart_in_googles_usage():
    """4 of the 9 sampled tokens are thoughts."""
    usage = {"prompt_tokens": 3, "completion_tokens": 9, "completion_tokens_details": {"reasoning_tokens": 4}}
    reply = json.dumps({"id": "chatcmpl-1", "model": MODEL, "choices": [], "usage": usage}).encode()
    call = Gemini().parse(CALLS[-1][1])
    counts = json.loads(Gemini().encode_reply(reply, call))["usageMetadata"]
    assert counts == {
        "promptTokenCount": 3,
        "candidatesTokenCount": 5,
        "totalTokenCount": 12,
        "thoughtsTokenCount": 4,
    }


EVENTS = [b'{"a": 1}', '{"text": "ž\\n"}'.encode(), b"[DONE]"]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@given(cuts=st.lists(st.integers(min_value=1, max_value=60), max_size=8))
def test_any_cut_gives_the_same_events(line_end: bytes, cuts: list[int]):
    stream = b"".join(map(event, EVENTS)).replace(b"\n", line_end)
    buffer, found, at = EventBuffer(), [], 0
    for size in [*cuts, len(stream)]:
        found += buffer.feed(stream[at : at + size])
        at += size
    assert found == EVENTS
    assert not b"".join(buffer.pending)


@pytest.mark.parametrize(
    "legal",
    [
        lambda stream: stream.replace(b"data: ", b"data:"),
        lambda stream: stream.replace(b"\n", b"\r"),
        lambda stream: stream.replace(b"\n", b"\r\n"),
        lambda stream: b"\xef\xbb\xbf" + stream,
        lambda stream: stream.replace(b'{"a": 1}', b'{"a":\ndata: 1}'),
        lambda stream: stream.replace(b'{"a": 1}', b'{"a":\n: a comment\nid: 7\ndata:1}'),
        lambda stream: b": begin\n\nevent: chunk\n" + stream + b": end\n\n\n",
        lambda stream: stream.removesuffix(b"\n"),
    ],
    ids=["no space", "CR", "CR LF", "byte order mark", "two lines", "fields between", "comments", "no empty line"],
)
@given(cuts=st.lists(st.integers(min_value=1, max_value=60), max_size=8))
def test_any_legal_stream_gives_its_events(legal, cuts):
    """As WHATWG's grammar allows it; an event's lines are joined. The empty line at the end may be missing, too."""
    stream = legal(b"".join(map(event, EVENTS)))
    buffer, found, at = EventBuffer(), [], 0
    for size in [*cuts, len(stream)]:
        found += buffer.feed(stream[at : at + size])
        at += size
    assert [data if data == b"[DONE]" else json.loads(data) for data in found] == [{"a": 1}, {"text": "ž\n"}, b"[DONE]"]
    assert not buffer.pending


OBJECTS = [(1, 2.5, ["text", b"bytes"]), {"key": None}, "x" * 3000]


def test_objects_are_decoded_wherever_the_stream_is_cut():
    stream = b"".join(piece for each in OBJECTS for piece in frame(each))
    for size in (1, 7, 8, 9, 100, len(stream) - 1, len(stream)):
        found: list[Any] = []
        link = Link(found.append)
        for start in range(0, len(stream), size):
            link.data_received(stream[start : start + size])
        assert found == OBJECTS, f"cut into pieces of {size} bytes"


def reply_to(send: Send) -> ReplySender:
    dialect = ChatCompletions()
    reply = ReplySender(send, dialect)
    reply.call = dialect.parse({"messages": [], "stream": True})
    return reply


async def test_the_events_of_a_stream_are_freed_without_a_garbage_collection():
    async def send(_: Message) -> None:
        """Send nothing."""

    gc.disable()
    try:
        reply = reply_to(send)
        with reply.kept_alive(60.0):
            await reply.part(b"data: {}\n\n")
        freed = weakref.ref(reply)
        del reply
        assert freed() is None
    finally:
        gc.enable()
