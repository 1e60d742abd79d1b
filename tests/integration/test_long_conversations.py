"""Long conversations, whose repeated part is neither decoded nor rendered again, are stored token for token."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from support.control_plane import metric
from support.proxies import RunningProxy, StartProxy, assert_served_is_stored
from support.waiting import wait_until

from turnwise.fake_engine import Fault, FaultKind, RunningFakeEngine, Script, running_fake_engine
from turnwise.types import Outcome

TEXT = 'Some text of a long conversation, 誰 — with what JSON escapes: "quoted", \\ and \n. ' * 40


def said(number: int) -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "shell", "arguments": f'{{"n": {number}}}'}}
    return [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number}: {TEXT}"},
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_long_conversation_that_grows_and_is_edited_is_exact(start_proxy: StartProxy, stream: bool) -> None:
    """Three turns, a branch from the second one, a compaction, and a turn after it."""
    with running_fake_engine(Script(max_model_len=1_000_000)) as engine:
        proxy = start_proxy(engine.url)
        engine.calls.clear()
        play(proxy, stream=stream)
        assert_served_is_stored(proxy, engine)
        views = proxy.turns("long")
    assert [view.turn.outcome for view in views] == [Outcome.EXACT] * 4 + [Outcome.RETOKENISED, Outcome.EXACT]
    ids = [view.turn.turn_id for view in views]
    assert [view.turn.parent_turn_id for view in views] == [None, ids[0], ids[1], ids[1], None, ids[4]]


def play(proxy: RunningProxy, *, stream: bool) -> None:
    messages = [{"role": "user", "content": TEXT}, *(each for number in range(40) for each in said(number))]
    with httpx.Client(timeout=60) as http:

        def ask() -> None:
            body = {"model": "fake", "messages": messages, "stream": stream, "max_tokens": 20}
            http.post(f"{proxy.session_v1('long')}/chat/completions", json=body).raise_for_status()
            text = "".join(view.turn.response["content"] for view in proxy.turns("long")[-1:])
            messages.append({"role": "assistant", "content": text})

        for number in range(3):
            messages.append({"role": "user", "content": f"Question {number}."})
            ask()
        messages[-2:] = [{"role": "user", "content": "Another question."}]
        ask()
        messages[1:-2] = [{"role": "user", "content": f"A summary. {TEXT * 25}"}]
        ask()
        messages.append({"role": "user", "content": "Go on."})
        ask()


LONG: list[dict[str, Any]] = [
    {"role": "user", "content": TEXT},
    *(each for number in range(40) for each in said(number)),
]
QUESTION = {"role": "user", "content": "And then?"}


def ask(proxy: RunningProxy, messages: list[dict[str, Any]], *, stream: bool = False) -> httpx.Response:
    """Send a conversation; append the reply that was stored."""
    body = {"model": "fake", "messages": messages, "stream": stream, "max_tokens": 20, "return_token_ids": stream}
    answer = httpx.post(f"{proxy.session_v1('long')}/chat/completions", json=body, timeout=60)
    if answer.status_code == 200:
        messages.append({"role": "assistant", "content": proxy.turns("long")[-1].turn.response["content"]})
    return answer


def sent_messages(engine: RunningFakeEngine) -> list[list[dict[str, Any]]]:
    """Return the messages of each call."""
    return [call.body["messages"] for call in engine.calls]


@pytest.mark.parametrize(("flags", "are_all_sent"), [((), False), (("--send-all-messages",), True)])
def test_the_engine_gets_only_new_messages_of_a_long_conversation_whose_ids_it_gets(
    start_proxy: StartProxy, flags: tuple[str, ...], are_all_sent: bool
) -> None:
    """A message stands for the 40 tool calls of those left out; stored are all messages."""
    with running_fake_engine(Script(max_model_len=1_000_000)) as engine:
        proxy, messages = start_proxy(engine.url, *flags), [*LONG, QUESTION]
        engine.calls.clear()
        for _ in range(2):
            assert ask(proxy, messages).is_success
            messages.append(QUESTION)
        first, second = sent_messages(engine)
        assert_served_is_stored(proxy, engine)
        view = proxy.turns("long")[-1]
    assert first == messages[:82]
    assert (second == messages[:84]) is are_all_sent
    if not are_all_sent:
        assert (len(second[0]["tool_calls"]), second[1:]) == (40, [QUESTION])
    assert (view.turn.outcome, view.messages) == (Outcome.EXACT, messages[:84])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_engine_that_ignores_the_ids_gets_the_call_again_with_all_messages(
    start_proxy: StartProxy, stream: bool
) -> None:
    """As one of another release behind the same address would; a later call is sent once.

    What this engine renders happens to be the ids that it was sent, so the turns are exact.
    """
    with running_fake_engine(Script(max_model_len=1_000_000)) as engine:
        proxy, messages = start_proxy(engine.url), [*LONG, QUESTION]
        engine.calls.clear()
        assert ask(proxy, messages, stream=stream).is_success
        engine.state.script.honours_prompt_token_ids = False
        for _ in range(2):
            messages.append(QUESTION)
            assert ask(proxy, messages, stream=stream).is_success
        assert list(map(len, sent_messages(engine))) == [82, 2, 84, 86]
        assert [view.turn.outcome for view in proxy.turns("long")] == [Outcome.EXACT] * 3
        wait_until(lambda: metric(proxy, "turnwise_calls_in_flight") == 0, "every place is free again")


def messages_text(reply: str) -> str:
    """Return the text of a stream of the Messages API, which must begin and end once."""
    events = [json.loads(line.removeprefix("data: ")) for line in reply.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events if event["type"].startswith("message_st")] == [
        "message_start",
        "message_stop",
    ]
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def gemini_text(reply: str) -> str:
    """Return the text of a Gemini stream that is one JSON array."""
    parts = [part for each in json.loads(reply) for part in each["candidates"][0]["content"].get("parts", ())]
    return "".join(part.get("text", "") for part in parts)


@pytest.mark.parametrize("dialect", ["messages", "gemini"])
def test_a_stream_that_is_repeated_with_all_messages_begins_again(start_proxy: StartProxy, dialect: str) -> None:
    """Nothing of the first reply is sent to the client."""
    said: list[tuple[str, str]] = [("user", TEXT * 25)]
    with running_fake_engine(Script(max_model_len=1_000_000)) as engine:
        proxy = start_proxy(engine.url)
        engine.calls.clear()
        for _ in range(2):
            if dialect == "messages":
                path, read = "v1/messages", messages_text
                asked = [{"role": role, "content": text} for role, text in said]
                body: dict[str, Any] = {"model": "fake", "messages": asked, "stream": True, "max_tokens": 20}
            else:
                path, read = "v1beta/models/fake:streamGenerateContent", gemini_text
                roles = {"user": "user", "assistant": "model"}
                body = {"contents": [{"role": roles[role], "parts": [{"text": text}]} for role, text in said]}
                body["generationConfig"] = {"maxOutputTokens": 20}
            answer = httpx.post(f"{proxy.url}/{path}", json=body, headers={"x-session-id": "long"}, timeout=60)
            text = read(answer.raise_for_status().text)
            assert text == proxy.turns("long")[-1].turn.response["content"]
            said += [("assistant", text), ("user", "And then?")]
            engine.state.script.honours_prompt_token_ids = False
        assert list(map(len, sent_messages(engine))) == [1, 1, 3]


def test_the_error_of_a_refused_request_is_that_of_all_messages(start_proxy: StartProxy) -> None:
    """The first refusal is of a request with two messages; the client gets the second, the turn is stored once."""
    with running_fake_engine(Script(max_model_len=1_000_000)) as engine:
        proxy, messages = start_proxy(engine.url), [*LONG, QUESTION]
        engine.calls.clear()
        assert ask(proxy, messages).is_success
        messages.append(QUESTION)
        engine.fail_next(Fault(kind=FaultKind.STATUS, status=400, count=2))
        assert ask(proxy, messages).status_code == 400
        assert ask(proxy, messages).is_success
        assert list(map(len, sent_messages(engine))) == [82, 2, 84, 2]
        outcomes = [view.turn.outcome for view in proxy.turns("long")]
    assert outcomes == [Outcome.EXACT, Outcome.ERROR, Outcome.EXACT]
