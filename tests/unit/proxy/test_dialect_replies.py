"""What clients of Messages, Responses and Gemini read of a reply, whole and streamed.

A client reads nothing that was not sampled: no call that was cut off, no end that the model did not reach.
"""

import json
from typing import Any

import pytest

from proxy.dialects.base import Call, Captured, Dialect
from proxy.engines.vllm_forms import read_parts
from proxy.features.formats.gemini import Gemini
from proxy.features.formats.messages import Messages
from proxy.features.formats.responses import Responses
from proxy.http import problems
from turnwise.errors import EngineUnavailable, Overloaded

Json = dict[str, Any]
HEAD = {"id": "chatcmpl-1", "created": 0, "model": "m"}
USAGE = {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17, "prompt_tokens_details": {"cached_tokens": 4}}
REQUESTS: list[tuple[Dialect, Json]] = [
    (Messages(), {"max_tokens": 9, "messages": [{"role": "user", "content": "Hi."}]}),
    (Responses(), {"input": "Hi.", "include": ["message.output_text.logprobs"]}),
    (Gemini(), {"contents": [{"parts": [{"text": "Hi."}]}], "alt": "sse"}),
]
CUT = '{"path": "/var/'


def called(index: int, arguments: str | None = None, name: str = "") -> Json:
    opened = {"id": f"call_{index}", "type": "function"} if name else {}
    return {"index": index, **opened, "function": {"name": name or None, "arguments": arguments}}


def call_of(dialect: Dialect, body: Json, *, stream: bool) -> Call:
    return dialect.parse({**body, "stream": stream})


def read_stream(dialect: Dialect, body: Json, deltas: list[Json], finish_reason: str) -> list[Json]:
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks += [
        {"choices": [{"index": 0, "delta": {}, "finish_reason": finish_reason}]},
        {"choices": [], "usage": USAGE},
    ]
    return events_of(dialect, body, chunks)


def events_of(dialect: Dialect, body: Json, chunks: list[Json]) -> list[Json]:
    encoder = call_of(dialect, body, stream=True).encoder
    sent = b"".join(encoder.chunks([json.dumps(HEAD | chunk).encode()]) for chunk in chunks) + encoder.done()
    return [json.loads(line[6:]) for line in sent.splitlines() if line.startswith(b"data: ")]


def read_whole(dialect: Dialect, body: Json, message: Json, finish_reason: str | None, **choice: Any) -> Json:
    reply = {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason, **choice}], "usage": USAGE}
    read: Json = json.loads(
        dialect.encode_reply(json.dumps(HEAD | reply).encode(), call_of(dialect, body, stream=False))
    )
    return read


def messages_of(events: list[Json]) -> tuple[list[Any], Any]:
    """Return the blocks of a stream of Messages, one after another, and its last event but one."""
    blocks: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "input_json_delta":
            blocks[event["index"]]["input"] = json.loads(event["delta"]["partial_json"])
        elif event["type"] == "content_block_delta" and event["delta"]["type"] == "text_delta":
            blocks[event["index"]]["text"] += event["delta"]["text"]
    return blocks, events[-2]


def read_reply(dialect: Dialect, body: Json, finish_reason: str, *calls: tuple[str, str], stream: bool) -> Any:
    """Return the calls that a client reads, by name and arguments, and the end of the reply."""
    made = [called(index, arguments, name) for index, (name, arguments) in enumerate(calls)]
    if stream:
        read: Any = read_stream(dialect, body, [{"tool_calls": [part]} for part in made], finish_reason)
    else:
        read = read_whole(dialect, body, {"content": None, "tool_calls": made}, finish_reason)
    match dialect:
        case Messages():
            blocks, last = messages_of(read) if stream else (read["content"], {"delta": read})
            made = [(each["name"], each["input"]) for each in blocks if each["type"] == "tool_use"]
            return made, last["delta"]["stop_reason"]
        case Responses():
            whole = read[-1]["response"] if stream else read
            items = [(each["name"], each["arguments"], each["status"]) for each in whole["output"] if "name" in each]
            return items, whole["status"]
    candidate = (read[-1] if stream else read)["candidates"][0]
    named = [part["functionCall"] for part in candidate["content"]["parts"] if "functionCall" in part]
    return [(each["name"], each["args"]) for each in named], candidate["finishReason"]


WHOLE = ("look", '{"n": 1}')
ENDS: list[tuple[str, list[Any]]] = [
    ("length", ["max_tokens", "incomplete", "MALFORMED_FUNCTION_CALL"]),
    ("content_filter", ["refusal", "incomplete", "MALFORMED_FUNCTION_CALL"]),
    ("tool_calls", ["tool_use", "completed", "MALFORMED_FUNCTION_CALL"]),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("finish_reason", "ends"), ENDS)
@pytest.mark.parametrize("arguments", [CUT, "", "[1]"])
def test_no_client_gets_a_call_whose_arguments_were_not_sampled_to_the_end(finish_reason, ends, arguments, *, stream):
    """The complete call beside it is sent. Without any argument a call is complete if the model ended it."""
    is_complete = finish_reason == "tool_calls" and not arguments
    items = [("look", '{"n": 1}', "completed"), ("read", arguments, "completed" if is_complete else "incomplete")]
    for (dialect, body), end in zip(REQUESTS, ends, strict=True):
        calls, found = read_reply(dialect, body, finish_reason, WHOLE, ("read", arguments), stream=stream)
        if isinstance(dialect, Responses):
            assert (calls, found) == (items, end)
        elif is_complete:
            assert (calls, found) == ([("look", {"n": 1}), ("read", {})], "STOP" if end.isupper() else end)
        else:
            assert (calls, found) == ([("look", {"n": 1})], end)


UNREAD = [
    '{"q": NaN}',
    '{"q": Infinity}',
    '["a"]',
    "{'q': 'a'}",
    '"a"',
    "null",
    '{"a": 1} x',
    '{"a": ' * 3000 + "1" + "}" * 3000,
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("arguments", UNREAD, ids=range(len(UNREAD)))
def test_a_call_that_ended_by_itself_and_that_nobody_reads_is_shown_as_text(arguments, *, stream):
    """Else the reply would look finished without it. Responses has arguments as text, so the call itself shows them."""
    (claude, body), (openai, given), (google, asked) = REQUESTS
    calls = [("look", arguments)]
    made = [called(0, arguments, "look")]
    if stream:
        events = read_stream(claude, body, [{"tool_calls": made}], "tool_calls")
        blocks, last = messages_of(events)
        (end,) = read_stream(google, asked, [{"tool_calls": made}], "tool_calls")[-1]["candidates"]
    else:
        whole = read_whole(claude, body, {"content": None, "tool_calls": made}, "tool_calls")
        blocks, last = whole["content"], {"delta": whole}
        (end,) = read_whole(google, asked, {"content": None, "tool_calls": made}, "tool_calls")["candidates"]
    text = f"This tool call could not be read: look({arguments})"
    assert (blocks, last["delta"]["stop_reason"]) == ([{"type": "text", "text": text}], "end_turn")
    assert (end["content"]["parts"], end["finishReason"]) == ([{"text": text}], "MALFORMED_FUNCTION_CALL")
    items, _ = read_reply(openai, given, "tool_calls", *calls, stream=stream)
    assert items == [("look", arguments, "incomplete")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    "arguments", ['{"q": "cut \\ud83d"}', '{"q": 1, "q": 2}', '{"q": 1e999}', '{"a": ' * 300 + "1" + "}" * 300]
)
def test_a_call_that_python_and_javascript_read_goes_out_as_it_was_sampled(arguments, *, stream):
    for dialect, body in REQUESTS:
        ((name, given, *_),), end = read_reply(dialect, body, "tool_calls", ("look", arguments), stream=stream)
        assert name == "look"
        assert (given if isinstance(given, str) else json.dumps(given)) == (
            arguments if isinstance(given, str) else json.dumps(json.loads(arguments))
        )
        assert end in ("tool_use", "completed", "STOP")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("finish_reason", ["abort", "error", "repetition", "something new", ""])
def test_a_reply_that_the_engine_broke_off_does_not_look_finished(finish_reason, *, stream):
    """Messages has no stop reason for it and answers with an error, which its clients retry."""
    (claude, body), (openai, given), (google, asked) = REQUESTS
    if stream:
        events = read_stream(
            claude, body, [{"content": "So"}, {"tool_calls": [called(0, "{}", "look")]}], finish_reason
        )
        assert (events[-1]["type"], events[-1]["error"]["type"]) == ("error", "overloaded_error")
        assert not any(event["type"] == "message_stop" or "tool_use" in str(event) for event in events)
        last = read_stream(openai, given, [{"content": "So"}], finish_reason)[-1]
        assert last["type"] == "response.failed"
        response = last["response"]
        (end,) = read_stream(google, asked, [{"content": "So"}], finish_reason)[-1]["candidates"]
    else:
        with pytest.raises(EngineUnavailable, match=f"with {finish_reason!r}"):
            read_whole(claude, body, {"content": "So"}, finish_reason)
        response = read_whole(openai, given, {"content": "So"}, finish_reason)
        (end,) = read_whole(google, asked, {"content": "So"}, finish_reason)["candidates"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert finish_reason in response["error"]["message"]
    assert (response["output"][0]["status"], response["output"][0]["content"][0]["text"]) == ("incomplete", "So")
    assert end["finishReason"] == "OTHER"


def test_a_whole_reply_without_a_finish_reason_does_not_look_finished():
    message = {"content": "So"}
    (claude, body), (openai, given), (google, asked) = REQUESTS
    with pytest.raises(EngineUnavailable, match="None"):
        read_whole(claude, body, message, None)
    assert read_whole(openai, given, message, None)["status"] == "failed"
    assert read_whole(google, asked, message, None)["candidates"][0]["finishReason"] == "OTHER"


def test_the_total_is_the_sum_where_an_engine_gives_none():
    chunk = {"choices": [{"index": 0, "delta": {"content": "So"}, "finish_reason": "stop"}]}
    usage = {"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 7}}
    dialect, body = REQUESTS[1]
    assert events_of(dialect, body, [chunk, usage])[-1]["response"]["usage"]["total_tokens"] == 17


@pytest.mark.parametrize(
    ("finish_reason", "ends"),
    [
        ("content_filter", ("refusal", "content_filter", "SAFETY")),
        ("length", ("max_tokens", "max_output_tokens", "MAX_TOKENS")),
    ],
)
def test_a_filtered_or_cut_reply_says_so_in_each_format(finish_reason, ends):
    (claude, body), (openai, given), (google, asked) = REQUESTS
    said = {"content": "So"}
    assert read_whole(claude, body, said, finish_reason)["stop_reason"] == ends[0]
    response = read_whole(openai, given, said, finish_reason)
    assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": ends[1]})
    assert read_whole(google, asked, said, finish_reason)["candidates"][0]["finishReason"] == ends[2]


INTERLEAVED = [
    {"reasoning": "hm"},
    {"content": "Two"},
    {"tool_calls": [called(0, '{"a"', "first")]},
    {"tool_calls": [called(1, '{"b"', "second"), called(0, ": 1")]},
    {"content": " calls."},
    {"tool_calls": [called(1, ": 2}")]},
    {"tool_calls": [called(0, "}")]},
]


def test_calls_whose_parts_alternate_are_put_together_by_their_index():
    """With text between, which goes on where it was. Blocks of Messages follow each other, items alternate."""
    (claude, body), (openai, given), (google, asked) = REQUESTS
    blocks, end = messages_of(read_stream(claude, body, INTERLEAVED, "tool_calls"))
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks[1]["text"] == "Two calls."
    assert [block["input"] for block in blocks[2:]] == [{"a": 1}, {"b": 2}]
    assert end["delta"]["stop_reason"] == "tool_use"
    events = read_stream(openai, given, INTERLEAVED, "tool_calls")
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert output[1]["content"][0]["text"] == "Two calls."
    assert [item["arguments"] for item in output[2:]] == ['{"a": 1}', '{"b": 2}']
    for item in output[2:]:
        parts = [event["delta"] for event in events if event.get("item_id") == item["id"] and "delta" in event]
        assert "".join(parts) == item["arguments"]
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    closed = [event["output_index"] for event in events if event["type"] == "response.output_item.done"]
    assert (added, sorted(closed)) == ([0, 1, 2, 3], added)
    (last,) = read_stream(google, asked, INTERLEAVED, "tool_calls")[-1]["candidates"]
    assert [part["functionCall"]["args"] for part in last["content"]["parts"]] == [{"a": 1}, {"b": 2}]


def of_call(call_id: str | None, name: str | None, arguments: Any, **index: Any) -> Json:
    return {"id": call_id, "function": {"name": name, "arguments": arguments}, **index}


def stored_calls(deltas: list[Json]) -> list[tuple[str, str]]:
    """Return the calls that are captured of a stream, by name and arguments."""
    captured = Captured()
    chunks = [json.dumps(HEAD | {"choices": [{"index": 0, "delta": delta}]}).encode() for delta in deltas]
    read_parts(chunks, captured, REQUESTS[0][0].parse({**REQUESTS[0][1], "stream": True}))
    calls = captured.choices[0].message().get("tool_calls") or []
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


FIRST, SECOND = ("a", "first", '{"n": 1}'), ("b", "second", '{"n": 2}')
UNUSUAL_INDICES: dict[str, list[Any]] = {
    "no index": [[of_call(*FIRST)], [of_call(*SECOND)]],
    "no index, in one chunk": [[of_call(*FIRST), of_call(*SECOND)]],
    "no index and no id": [[of_call(None, *FIRST[1:])], [of_call("", *SECOND[1:])]],
    "null": [
        [of_call(*FIRST, index=None)],
        [of_call("b", "second", '{"n"', index=None)],
        [of_call(None, None, ": 2}")],
    ],
    "the same index": [[of_call(*FIRST, index=0)], [of_call(*SECOND, index=0)]],
    "from one on": [[of_call(*FIRST, index=1)], [of_call(*SECOND, index=2)]],
    "with a gap, backwards": [[of_call(*SECOND, index=7)], [of_call(*FIRST, index=3)]],
    "negative": [[of_call(*FIRST, index=-1)], [of_call(*SECOND, index=0)]],
    "arguments as an object": [[of_call("a", "first", {"n": 1}, index=0)], [of_call(*SECOND, index=1)]],
    "a new id in each part": [
        [of_call("a", "first", '{"n"', index=0), of_call(*SECOND, index=1)],
        [of_call("c", None, ": 1}", index=0)],
    ],
}


@pytest.mark.parametrize("parts", UNUSUAL_INDICES.values(), ids=list(UNUSUAL_INDICES))
def test_calls_are_told_apart_where_an_engine_leaves_their_index_out_or_repeats_it(parts):
    """What is stored is what each client reads: these two calls, and none between them."""
    deltas = [{"tool_calls": calls} for calls in parts]
    (claude, body), (openai, given), (google, asked) = REQUESTS
    found = [(name, json.loads(arguments)) for name, arguments in stored_calls(deltas)]
    assert found == [("first", {"n": 1}), ("second", {"n": 2})]
    blocks, _ = messages_of(read_stream(claude, body, deltas, "tool_calls"))
    assert [(block["name"], block["input"]) for block in blocks] == found
    output = read_stream(openai, given, deltas, "tool_calls")[-1]["response"]["output"]
    assert sorted((item["name"], json.loads(item["arguments"])) for item in output) == found
    (end,) = read_stream(google, asked, deltas, "tool_calls")[-1]["candidates"]
    called = [part["functionCall"] for part in end["content"]["parts"]]
    assert [(call["name"], call["args"]) for call in called] == found


@pytest.mark.parametrize("part", [{"index": 0, "function": {}}, {"index": 0, "function": None}, {"index": 0}])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_part_of_a_call_that_says_nothing_is_no_call(part, *, stream):
    """vLLM's parsers send such parts where they find no call in what looks like one."""
    assert stored_calls([{"tool_calls": [part]}]) == []
    said = {"content": "So", "tool_calls": [part]}
    for (dialect, body), end in zip(REQUESTS, ("end_turn", "completed", "STOP"), strict=True):
        if stream:
            read: Any = read_stream(dialect, body, [said], "tool_calls")
        else:
            read = read_whole(dialect, body, said, "tool_calls")
        assert "So" in str(read)
        assert end in str(read)
        assert not any(kind in str(read) for kind in ("tool_use'", "function_call'", "functionCall"))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_call_without_a_name_reaches_no_client_as_a_complete_one(*, stream):
    for (dialect, body), end in zip(REQUESTS, ("tool_use", "completed", "MALFORMED_FUNCTION_CALL"), strict=True):
        calls, found = read_reply(dialect, body, "tool_calls", WHOLE, ("", "{}"), stream=stream)
        assert ([call for call in calls if call[0]], found) == ([(*calls[0][:1], *calls[0][1:])], end)
        assert all(call[-1] == "incomplete" for call in calls[1:])


COUNTS: list[tuple[Json | None, tuple[int, int, int]]] = [
    (None, (0, 0, 0)),
    ({"prompt_tokens": None, "completion_tokens": None, "total_tokens": None}, (0, 0, 0)),
    ({"prompt_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": None}}, (10, 0, 7)),
    ({"prompt_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 30}}, (0, 10, 7)),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("usage", "counts"), COUNTS)
def test_counts_that_an_engine_leaves_out_are_zero_and_none_is_negative(usage, counts, *, stream):
    """By Anthropic's way of counting: input tokens that were not cached, cached ones, sampled ones."""
    message: Json = {"content": "So"}
    ends: list[Json] = []
    for dialect, body in REQUESTS:
        call = call_of(dialect, body, stream=stream)
        if stream:
            chunks = [{"choices": [{"index": 0, "delta": message, "finish_reason": "stop"}]}, {"choices": []}]
            sent = b"".join(
                call.encoder.chunks([json.dumps(HEAD | chunk | {"usage": usage}).encode()]) for chunk in chunks
            )
            lines = (sent + call.encoder.done()).splitlines()
            events = [json.loads(line[6:]) for line in lines if line.startswith(b"data: ")]
            ends.append(events[-2] if isinstance(dialect, Messages) else events[-1].get("response") or events[-1])
        else:
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = HEAD | {"choices": [choice], "usage": usage}
            ends.append(json.loads(dialect.encode_reply(json.dumps(reply).encode(), call)))
    claude, openai, google = ends
    of_claude = claude["usage"]
    assert (of_claude["input_tokens"], of_claude["cache_read_input_tokens"], of_claude["output_tokens"]) == counts
    assert (openai["usage"]["input_tokens"], openai["usage"]["output_tokens"]) == (counts[0] + counts[1], counts[2])
    assert google["usageMetadata"]["promptTokenCount"] == counts[0] + counts[1]


@pytest.mark.parametrize("left_out", [{}, {"delta": None, "message": None}], ids=["missing", "null"])
def test_a_delta_or_a_message_that_an_engine_leaves_out_is_empty(left_out):
    choice = {"index": 0, "finish_reason": "stop", **left_out}
    said = {"choices": [{"index": 0, "delta": {"content": "So"}, "finish_reason": None}]}
    for (dialect, body), end in zip(REQUESTS, ("end_turn", "completed", "STOP"), strict=True):
        events = events_of(dialect, body, [said, {"choices": [choice]}, {"choices": [], "usage": USAGE}])
        assert end in str(events[-2:])
        reply = HEAD | {"choices": [choice], "usage": USAGE}
        assert end in dialect.encode_reply(json.dumps(reply).encode(), call_of(dialect, body, stream=False)).decode()


def test_a_stop_sequence_is_named_only_where_it_ended_the_reply():
    """As Anthropic documents it: null with every other stop reason."""
    claude, body = REQUESTS[0]
    called_one = {"content": None, "tool_calls": [called(0, "{}", "look")]}
    read = read_whole(claude, body, called_one, "tool_calls", stop_reason="</tool>")
    assert (read["stop_reason"], read["stop_sequence"]) == ("tool_use", None)
    read = read_whole(claude, body, {"content": "So"}, "stop", stop_reason="END")
    assert (read["stop_reason"], read["stop_sequence"]) == ("stop_sequence", "END")


def test_the_end_of_a_stream_has_the_whole_usage():
    """Anthropic's counts are cumulative; its input tokens are those that were not cached."""
    (claude, body), _, (google, asked) = REQUESTS
    usage = read_stream(claude, body, [{"content": "So"}], "stop")[-2]["usage"]
    assert usage == {
        "input_tokens": 6,
        "output_tokens": 7,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
    }
    counts = read_stream(google, asked, [{"content": "So"}], "stop")[-1]["usageMetadata"]
    expected = {"promptTokenCount": 10, "candidatesTokenCount": 7, "totalTokenCount": 17, "cachedContentTokenCount": 4}
    assert counts == expected
    assert read_whole(google, asked, {"content": "So"}, "stop")["usageMetadata"] == expected


def test_a_stream_of_two_candidates_counts_the_tokens_of_both():
    """vLLM's chunks count the tokens of their own choice. Google's SDK drops a reply whose end has no candidate."""
    google, asked = REQUESTS[2]
    asked = {**asked, "generationConfig": {"candidateCount": 2}}
    counted = {"prompt_tokens": 10, "total_tokens": 12, "completion_tokens": 2}
    chunks: list[Json] = [
        {"choices": [{"index": index, "delta": {"content": "So"}, "finish_reason": end}], "usage": counted}
        for index, end in ((0, None), (1, None), (1, "stop"), (0, "length"))
    ]
    events = events_of(google, asked, [*chunks, {"choices": [], "usage": {**counted, "completion_tokens": 4}}])
    assert [event["usageMetadata"]["candidatesTokenCount"] for event in events] == [2, 4, 4]
    ends = [(each["index"], each["finishReason"]) for each in events[-1]["candidates"]]
    assert ends == [(0, "MAX_TOKENS"), (1, "STOP")]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_logprobs_of_a_text_are_those_of_its_own_tokens(*, stream):
    """Not those of the thinking, which repeats the text here, nor of the marks around both."""
    openai, given = REQUESTS[1]
    tokens = ["<think>", "So", " it", " is", "</think>", "\n\n", "So", " it", " is", "<tool>", "So", "</tool>"]
    content = [{"token": token, "logprob": -1.0 * number, "bytes": []} for number, token in enumerate(tokens)]
    if stream:
        parts = [({"reasoning": "So it is"}, content[:5]), ({"content": "So"}, content[5:7])]
        parts += [({"content": " it is", "tool_calls": [called(0, "{}", "look")]}, content[7:])]
        chunks: list[Json] = [
            {"choices": [{"index": 0, "delta": delta, "logprobs": {"content": entries}, "finish_reason": None}]}
            for delta, entries in parts
        ]
        chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}], "usage": USAGE})
        response = events_of(openai, given, chunks)[-1]["response"]
    else:
        message = {"reasoning": "So it is", "content": "So it is", "tool_calls": [called(0, "{}", "look")]}
        response = read_whole(openai, given, message, "tool_calls", logprobs={"content": content})
    (text,) = response["output"][1]["content"]
    assert [(each["token"], each["logprob"]) for each in text["logprobs"]] == [("So", -6), (" it", -7), (" is", -8)]


def test_an_argument_with_line_breaks_stays_one_event():
    google, asked = REQUESTS[2]
    (last,) = read_stream(google, asked, [{"tool_calls": [called(0, '{\n "a":\r\n 1}', "look")]}], "tool_calls")
    (part,) = last["candidates"][0]["content"]["parts"]
    assert part["functionCall"]["args"] == {"a": 1}


@pytest.mark.parametrize(
    ("mark", "content", "said"),
    [
        ("It failed.", "no such file", "It failed.\nno such file"),
        ("It failed.", None, "It failed."),
        ("It failed.", [{"type": "text", "text": "no"}, {"type": "text", "text": "file"}], "It failed.\nno\nfile"),
        ("", "no such file", "no such file"),
    ],
)
def test_a_failed_tool_call_says_so_in_its_text(mark, content, said):
    """In Messages by `is_error`; in Responses by the status of the output."""
    called_before = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True, "content": content}
    asked = {"max_tokens": 9, "messages": [called_before, {"role": "user", "content": [result]}]}
    call = Messages().parse(asked, failed_tool_text=mark)
    assert call.messages[-1] == {"role": "tool", "tool_call_id": "c", "content": said}
    assert Messages().count_request(asked, failed_tool_text=mark)["messages"] == call.messages
    texts = [{**part, "type": "input_text"} for part in content] if isinstance(content, list) else content
    items: list[Any] = [{"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}]
    for status in ("failed", "incomplete", "completed"):
        output = {"type": "function_call_output", "call_id": "c", "output": texts, "status": status}
        call = Responses().parse({"input": [*items, output]}, failed_tool_text=mark)
        plain = said.removeprefix("It failed.").lstrip("\n")
        assert call.messages[-1]["content"] == (plain if status == "completed" else said)


@pytest.mark.parametrize(
    ("parts", "calls"),
    [
        # The id and the name with each part, at one index and without one.
        (
            [(0, "c1", "look", ""), (0, None, None, '{"q": '), (0, "c1", "look", '"a"}')],
            [("look", '{"q": "a"}')],
        ),
        ([(None, "c1", "look", '{"q": '), (None, "c1", "look", '"a"}')], [("look", '{"q": "a"}')]),
        # The name alone, whole again or longer with each part; and in pieces.
        ([(0, "c1", "look", '{"q": '), (0, None, "look", '"a"}')], [("look", '{"q": "a"}')]),
        ([(0, "c1", "lo", "{"), (0, None, "look", "}")], [("look", "{}")]),
        ([(0, "c1", "lo", "{"), (0, None, "ok", ""), (0, None, "look", "}")], [("look", "{}")]),
        # Two calls of one name, their parts interleaved; also at one index.
        (
            [(0, "c1", "look", "{"), (1, "c2", "look", "{"), (0, "c1", "look", "}"), (1, "c2", "look", "}")],
            [("look", "{}"), ("look", "{}")],
        ),
        (
            [(0, "c1", "look", "{"), (0, "c2", "write", "{"), (0, "c1", "look", "}"), (0, "c2", "write", "}")],
            [("look", "{}"), ("write", "{}")],
        ),
    ],
)
def test_a_name_that_an_engine_repeats_is_stored_and_sent_once(parts, calls):
    deltas = [
        {"tool_calls": [{"index": index, "id": own, "function": {"name": name, "arguments": text}}]}
        for index, own, name, text in parts
    ]
    captured = Captured()
    for delta in deltas:
        chunk = HEAD | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        read_parts([json.dumps(chunk).encode()], captured, REQUESTS[0][0].parse({**REQUESTS[0][1], "stream": True}))
    stored = captured.choices[0].message()["tool_calls"]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in stored] == calls
    (claude, body), (openai, given), (google, asked) = REQUESTS
    blocks = [
        event["content_block"]["name"]
        for event in read_stream(claude, body, deltas, "tool_calls")
        if event["type"] == "content_block_start"
    ]
    items = read_stream(openai, given, deltas, "tool_calls")[-1]["response"]["output"]
    (candidate,) = read_stream(google, asked, deltas, "tool_calls")[-1]["candidates"]
    names = [name for name, _ in calls]
    assert blocks == [item["name"] for item in items] == names
    assert [part["functionCall"]["name"] for part in candidate["content"]["parts"]] == names


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (EngineUnavailable("the engine ended its stream early"), ("overloaded_error", "server_error", "UNAVAILABLE")),
        (Overloaded("too many calls"), ("rate_limit_error", "rate_limit_exceeded", "RESOURCE_EXHAUSTED")),
        (problems.UNEXPECTED, ("api_error", "server_error", "INTERNAL")),
    ],
    ids=["engine", "limit", "defect"],
)
@pytest.mark.parametrize("deltas", [[], [{"content": "So"}]], ids=["nothing sent", "text sent"])
def test_a_stream_that_breaks_ends_with_the_error_that_its_clients_know(deltas, error, kinds):
    """Their SDKs retry an overloaded server; OpenAI's wait for a response that is completed, incomplete or failed."""
    status, body, _ = problems.answer(error)
    lasts = []
    for dialect, asked in REQUESTS:
        encoder = call_of(dialect, asked, stream=True).encoder
        chunks = [HEAD | {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        sent = encoder.chunks([json.dumps(chunk).encode() for chunk in chunks]) + encoder.error(body, status)
        sent += encoder.done()
        lasts.append([json.loads(line[6:]) for line in sent.splitlines() if line.startswith(b"data: ")][-1])
    claude, openai, google = lasts
    assert (claude["type"], claude["error"]) == ("error", {"type": kinds[0], "message": str(error)})
    assert (openai["type"], openai["response"]["status"]) == ("response.failed", "failed")
    assert openai["response"]["error"] == {"code": kinds[1], "message": str(error)}
    assert openai["response"]["id"].startswith("resp_")
    assert (google["error"]["code"], google["error"]["status"]) == (status, kinds[2])
