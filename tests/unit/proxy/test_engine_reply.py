"""The fields that are removed from an engine's reply, and that no other byte changes, whatever the text."""

import json

import msgspec
import numpy as np
import pytest

from proxy.dialects.base import SENT, Call, Captured
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.logprobs import read_logprobs
from proxy.engines.vllm_forms import read_parts
from proxy.sessions.forest import encode_ids

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


def asking(*fields: str) -> Call:
    """Return a whole call, whose client gets these fields."""
    names = {"logprobs": "logprobs", "token_ids": "return_token_ids"}
    return ChatCompletions().parse({"messages": []} | {names[field]: True for field in fields})


def read(*parts: bytes, shows: frozenset[str] = frozenset()) -> tuple[list[bytes], Captured]:
    """Return what a client gets that asked for some fields, and what is captured."""
    captured = Captured()
    return read_parts(list(parts), captured, asking(*shows)), captured


SHOWN = [frozenset(), frozenset({"logprobs"}), frozenset({"token_ids"}), frozenset({"logprobs", "token_ids"})]


@pytest.mark.parametrize("shows", SHOWN, ids=lambda wanted: "+".join(sorted(wanted)))
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
def test_only_fields_that_were_not_requested_become_null(choices, separators, shows):
    """Every other byte stays as it is: with both fields requested, the reply is the engine's own bytes."""
    raw = json.dumps(reply(*choices, prompt_token_ids=[1, 2]), separators=separators).encode()
    (shown,), captured = read(raw, shows=shows)
    hidden = {"logprobs", "token_ids"} - shows
    kept = [{key: None if key in hidden else value for key, value in each.items()} for each in choices]
    assert json.loads(shown) == reply(*kept, prompt_token_ids=None if "token_ids" in hidden else [1, 2])
    assert shown == raw or hidden
    assert captured.prompt_ids == b"1,2"
    for each in choices:
        found = captured.choices[each["index"]]
        assert (found.token_ids, found.message()) == (each.get("token_ids", []), {**found.message(), **each["message"]})
        expected = [entry["logprob"] for entry in (each["logprobs"] or {}).get("content") or ()]
        assert read_logprobs(found.logprobs) == expected


@pytest.mark.parametrize(
    ("echo", "is_sent"),
    [(b"[1, 22]", False), (b"[1,22]", True), (b"[1,22,3]", False), (b"[1,2]", False), (b"null", False)],
)
def test_the_prompt_that_was_sent_is_recognised_in_the_reply(echo, is_sent):
    """The text of its ids, from bracket to bracket; any other prompt is captured."""
    captured, sent = Captured(), encode_ids(np.array([1, 22], np.int32))
    parts = [b'{"choices":[],"prompt_token_ids":%b}' % echo, b'{"choices":[],"prompt_token_ids":null}']
    shown = read_parts(parts, captured, asking(), sent)
    assert shown == [b'{"choices":[],"prompt_token_ids":null}'] * 2
    assert captured.prompt_ids == (SENT if is_sent else echo.strip(b"[]nul").replace(b" ", b""))


def test_ids_of_another_field_are_not_taken_for_the_prompt():
    """Such as the parameters of a transfer, which a reply may repeat."""
    captured, sent = Captured(), encode_ids(np.array([1, 22], np.int32))
    part = b'{"kv_transfer_params":{"prompt_token_ids":[1,22]},"choices":[],"prompt_token_ids":[3]}'
    read_parts([part], captured, asking(), sent)
    assert captured.prompt_ids == b"3"


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
def test_the_ids_of_a_prompt_are_read_where_they_are(separators):
    """Of the reply, or of each choice; a text that looks like them is none."""
    of_reply = json.dumps(reply(choice(), prompt_token_ids=[1, 2]), separators=separators).encode()
    (shown,), captured = read(of_reply)
    assert (captured.prompt_ids, captured.choices[0].prompt_ids) == (b"1,2", b"")
    assert json.loads(shown)["choices"][0]["message"]["content"] == TRAPS
    texts = [choice(0, prompt_token_ids=[3], text="a"), choice(1, prompt_token_ids=[4, 5], text="b")]
    (shown,), captured = read(json.dumps(reply(*texts), separators=separators).encode())
    assert (captured.prompt_ids, [each.prompt_ids for each in captured.choices.values()]) == (b"3", [b"3", b"4,5"])
    assert [each["prompt_token_ids"] for each in json.loads(shown)["choices"]] == [None, None]


def test_a_text_that_equals_the_prompts_ids_stays_in_the_reply():
    """A reply may quote `[1,2]`, or have it as the bytes of a token."""
    entry = {"token": "[1,2]", "logprob": -0.5, "bytes": [1, 2], "top_logprobs": []}
    said = choice(logprobs={"content": [entry]}, token_ids=[1, 2])
    said["message"]["content"] = "[1,2]"
    (shown,), _ = read(json.dumps(reply(said, prompt_token_ids=[1, 2])).encode(), shows=frozenset({"logprobs"}))
    assert json.loads(shown) == reply({**said, "token_ids": None}, prompt_token_ids=None)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'{"choices":1}', b'{"choices":[{"index":0,"logprobs":{', b'{"choices":[]},{"choices":[]}'],
)
def test_a_reply_that_is_not_a_completion_is_refused(raw):
    with pytest.raises(msgspec.DecodeError):
        read(raw)


def test_the_logprobs_of_a_streams_chunks_are_read_and_unreadable_ones_are_treated_as_missing():
    assert read_logprobs([b'{"content":[{"logprob":-1.0}]}', b'{"content":[{"logprob":"x"}]}']) == []
    of_one, of_none = b'{"content":[{"logprob":-1.0}]}', b'{"content":[]}'
    assert read_logprobs([of_one, of_one, of_none, of_one, b"null", of_one]) == [-1.0] * 4
    assert read_logprobs([b"null", b"{}", b'{"token_logprobs":[-1.0,null]}']) == [-1.0, None]


@pytest.mark.parametrize("array", [b'["1"]', b"[1.5]", b"[-1]", b"[[1]]", b"{}"])
def test_prompt_ids_that_are_no_ids_are_refused(array):
    """The text of the ids is stored without being decoded first."""
    with pytest.raises(msgspec.ValidationError):
        read(b'{"choices":[],"prompt_token_ids":%b}' % array)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("shows", SHOWN, ids=lambda wanted: "+".join(sorted(wanted)))
def test_a_logprob_that_json_does_not_know_is_null_and_the_reply_is_served(number, shows):
    """Texts that name such numbers stay as they are: Python's JSON writes both."""
    told = ENTRY | {"token": 'a NaN, "-Infinity" \\\\" : NaN'}
    whole = reply(choice(logprobs={"content": [told | {"logprob": -0.5}, told | {"logprob": float(number)}]}))
    raw = json.dumps(whole).encode()
    assert f'"logprob": {number}'.encode() in raw
    (shown,), captured = read(raw, shows=shows)
    assert read_logprobs(captured.choices[0].logprobs) == [-0.5, None]
    entries = json.loads(shown, parse_constant=pytest.fail)["choices"][0]["logprobs"]
    if "logprobs" in shows:
        assert entries["content"] == [told | {"logprob": -0.5}, told | {"logprob": None}]
    assert json.loads(shown)["choices"][0]["message"] == choice()["message"]
