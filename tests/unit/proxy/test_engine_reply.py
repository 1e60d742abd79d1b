"""The fields that are removed from an engine's reply, and that no other byte changes, whatever the text."""

from __future__ import annotations

import json

import msgspec
import orjson
import pytest

from proxy.dialects.engine_reply import (
    LongEcho,
    cut_long_echo,
    read_chunks,
    read_ids,
    read_logprobs,
    read_reply,
    without_ids,
)
from proxy.settings import ProxySettings

ENTRY = {"token": '},"finish_reason":', "logprob": -0.5, "bytes": [125], "top_logprobs": []}
TRAPS = '"logprobs":{"content":[]},"finish_reason":"stop" "token_ids":[1] "prompt_token_ids":[2] \u2028 ü'
COMPACT, SPACED = (",", ":"), (", ", ": ")


def reply(*choices: dict, **known) -> dict:
    return {"id": "c", "model": "m", "choices": list(choices), "usage": None, **known}


def choice(index: int = 0, logprobs: dict | None = None, **known) -> dict:
    """Return a choice in vLLM's order of fields; its text contains everything that looks like a field."""
    message = {"role": "assistant", "content": TRAPS}
    return {
        "index": index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": "stop",
        "token_ids": [7],
        **known,
    }


def some(*logprobs: float) -> dict:
    return {"content": [ENTRY | {"logprob": each} for each in logprobs]}


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
@pytest.mark.parametrize(
    "choices",
    [
        [choice(logprobs=some(-0.5, -2.0))],
        [choice()],
        [choice(logprobs={"content": None})],
        [choice(0, some(-1.0)), choice(1, some(-2.0, -3.0))],
        [choice(0), choice(1, some(-2.0))],
        [{"index": 0, "finish_reason": "stop", "logprobs": some(-4.0), "message": {"content": TRAPS}}],
        [
            {"index": 0, "finish_reason": "stop", "logprobs": some(-4.0), "message": {"content": "a", "x": [{}]}},
            {"index": 1, "finish_reason": "stop", "logprobs": some(-5.0), "message": {"content": "b"}},
        ],
        [],
    ],
)
def test_only_fields_that_were_not_requested_become_null(choices, separators):
    whole = reply(*choices, prompt_token_ids=[1, 2])
    raw = json.dumps(whole, separators=separators).encode()
    parsed = read_reply(raw, has_one_choice=len(choices) < 2)

    def stripped(fields: set[str]) -> dict:
        kept = [{key: None if key in fields else value for key, value in each.items()} for each in choices]
        return reply(*kept, prompt_token_ids=None if "token_ids" in fields else [1, 2])

    assert parsed.raw == raw
    assert json.loads(parsed.rest) == stripped({"logprobs"})
    assert json.loads(without_ids(parsed.raw)) == stripped({"token_ids"})
    assert json.loads(without_ids(parsed.rest)) == stripped({"logprobs", "token_ids"})
    assert [each.token_ids for each in parsed.reply.choices] == [each.get("token_ids") for each in choices]
    expected = [[entry["logprob"] for entry in (each["logprobs"] or {}).get("content") or ()] for each in choices]
    found = [read_logprobs(parsed.logprobs[position:][:1]) for position in range(len(choices))]
    assert found == expected


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
def test_the_ids_of_a_prompt_are_read_where_they_are(separators):
    """Of the reply, or of a choice; a text that looks like them is none."""
    of_reply = json.dumps(reply(choice(), prompt_token_ids=[1, 2]), separators=separators).encode()
    assert read_ids(read_reply(of_reply, has_one_choice=True).reply.prompt_token_ids) == (b"1,2", 2)
    of_choice = json.dumps(reply(choice(prompt_token_ids=[3], text=TRAPS)), separators=separators).encode()
    read = read_reply(of_choice, has_one_choice=True)
    assert (read_ids(read.reply.prompt_token_ids), read.rest) == ((b"", 0), of_choice)
    nested = json.dumps(reply(choice(), prompt_token_ids=[[1], 2]), separators=separators).encode()
    with pytest.raises(msgspec.DecodeError):
        read_ids(read_reply(nested, has_one_choice=True).reply.prompt_token_ids)


def test_a_reply_that_is_not_a_completion_is_refused():
    for raw in (b"", b"{", b"[]", b'{"choices":1}', b'{"choices":[{"index":0,"logprobs":{"content":1},"finish_reason"'):
        with pytest.raises(msgspec.DecodeError):
            read_reply(raw, has_one_choice=True)


def test_the_logprobs_of_a_streams_chunks_are_read_and_unreadable_ones_are_treated_as_missing():
    assert read_logprobs([b'{"content":[{"logprob":-1.0}]}', b'{"content":[{"logprob":"x"}]}']) == []
    of_one, of_none = b'{"content":[{"logprob":-1.0}]}', b'{"content":[]}'
    assert read_logprobs([of_one, of_one, of_none, of_one, b"null", of_one]) == [-1.0] * 4
    assert read_logprobs([b"null", b"{}", b'{"token_logprobs":[-1.0,null]}']) == [-1.0, None]


CHUNK = (
    b'{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"logprob":-0.5}]},"finish_reason":null}]}'
)
SPACED = b'{"choices": [{"index": 0, "logprobs": {"content": [{"logprob": -1}]}, "delta": {}, "finish_reason": null}]}'


USAGE = b'{"choices":[],"usage":{"prompt_tokens":1}}'
TRAP = b'{"choices":[{"index":0,"delta":{"content":"\\"logprobs\\":{"},"logprobs":null,"finish_reason":null}]}'


@pytest.mark.parametrize("chunks", [[CHUNK], [CHUNK, CHUNK], [CHUNK, USAGE], [TRAP, CHUNK, TRAP]])
def test_chunks_that_are_read_together_give_the_same_result_as_read_one_by_one(chunks):
    together, each = read_chunks(chunks), [read_reply(chunk, has_one_choice=True) for chunk in chunks]
    assert together is not None
    assert together.rest.split(b"\n") == [one.rest for one in each]
    assert together.replies == [one.reply for one in each]
    assert together.logprobs == [piece for one in each for piece in one.logprobs]


@pytest.mark.parametrize("other", [SPACED, b'{"choices":[]},{"choices":[]}', b'{"choices":\n[]}'])
def test_chunks_in_another_format_are_not_read_together(other):
    """`SPACED` is formatted otherwise, so its logprobs are found by decoding."""
    assert read_chunks([CHUNK, other, CHUNK]) is None


@pytest.mark.parametrize("array", [b'["1"]', b"[1.5]", b"[-1]", b"[[1]]", b"{}"])
def test_prompt_ids_that_are_no_ids_are_refused(array):
    """The text of the ids is stored without being decoded first."""
    parsed = read_reply(b'{"choices":[],"prompt_token_ids":%b}' % array, has_one_choice=True)
    with pytest.raises(msgspec.ValidationError):
        read_ids(parsed.reply.prompt_token_ids)


def test_the_text_of_prompt_ids_has_no_spaces():
    parsed = read_reply(b'{"choices":[],"prompt_token_ids": [1, 22,\n3]}', has_one_choice=True)
    assert read_ids(parsed.reply.prompt_token_ids) == (b"1,22,3", 3)
    assert read_ids(read_reply(b'{"choices":[]}', has_one_choice=True).reply.prompt_token_ids) == (b"", 0)


@pytest.mark.parametrize("num_ids", [1, 2, 300_000])
def test_the_long_prompt_ids_of_a_reply_are_cut_out_and_counted(num_ids: int):
    """300,000 ids are more than one part of what is checked at once."""
    ids = b",".join(b"%d" % (number % 50_000) for number in range(num_ids))
    for head, tail in ((b'{"choices":[],', b"}"), (b"{", b',"choices":[{"index":0,"token_ids":[1,2]}]}')):
        found = cut_long_echo(b'%b"prompt_token_ids":[%b]%b' % (head, ids, tail))
        assert found == LongEcho(b'%b"prompt_token_ids":null%b' % (head, tail), ids, num_ids)


@pytest.mark.parametrize(
    "reply",
    [
        b'{"choices":[]}',
        b'{"prompt_token_ids":null}',
        b'{"prompt_token_ids":[]}',
        b'{"prompt_token_ids":[1, 2]}',
        b'{"prompt_token_ids":["1"]}',
        b'{"prompt_token_ids":[[1],2]}',
        b'{"prompt_token_ids":[1,2',
        b'{"prompt_token_ids":[1],"choices":[{"prompt_token_ids":[2]}]}',
    ],
)
def test_prompt_ids_in_another_form_stay_in_the_reply(reply: bytes):
    assert cut_long_echo(reply) is None


def test_the_longest_usual_reply_fits_into_the_default_limit_of_bytes():
    """131,072 tokens, each with 20 alternatives of three Chinese characters and a logprob of 17 digits, as a stream."""
    token = {"token": "\u7684\u4e00\u662f", "logprob": -12.375001907348633, "bytes": [231, 154, 132] * 3}
    chunk = {
        "id": "chatcmpl-" + "a" * 32,
        "object": "chat.completion.chunk",
        "created": 1750000000,
        "model": "organisation/a-long-name-of-a-model",
        "choices": [
            {"index": 0, "delta": {"content": "\u7684\u4e00\u662f"}, "finish_reason": None, "token_ids": [151000]}
        ],
    }
    chunk["choices"][0]["logprobs"] = {"content": [{**token, "top_logprobs": [token] * 20}]}
    event = b"data: " + orjson.dumps(chunk) + b"\n\n"
    assert 131_072 * len(event) < ProxySettings().max_reply_bytes
