"""Long conversations, whose repeated part is neither decoded nor rendered again, are stored token for token."""

from typing import Any

import httpx
import pytest
from support.proxies import RunningProxy, assert_served_is_stored
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Script, running_fake_engine

from turnwise.types import Outcome

TEXT = 'Some text of a long conversation, 誰 — with what JSON escapes: "quoted", \\ and \n. ' * 40


def said(number: int) -> list[dict[str, Any]]:
    call = {"id": f"c{number}", "type": "function", "function": {"name": "shell", "arguments": f'{{"n": {number}}}'}}
    return [
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number}: {TEXT}"},
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_long_conversation_that_grows_and_is_edited_is_exact(start_proxy, stream):
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
    with httpx.Client(timeout=WAIT_SECONDS) as http:

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


def ask(proxy: RunningProxy, messages: list[dict[str, Any]]) -> httpx.Response:
    """Send a conversation; append the reply that was stored."""
    body = {"model": "fake", "messages": messages, "max_tokens": 20}
    answer = httpx.post(f"{proxy.session_v1('long')}/chat/completions", json=body, timeout=WAIT_SECONDS)
    messages.append({"role": "assistant", "content": proxy.turns("long")[-1].turn.response["content"]})
    return answer


def test_the_engine_gets_all_messages_of_a_long_conversation_beside_the_ids(start_proxy):
    """Routers before the engine and its tool parsers may read them."""
    with running_fake_engine(Script(max_model_len=1_000_000)) as engine:
        proxy, messages = start_proxy(engine.url), [*LONG, QUESTION]
        engine.calls.clear()
        for _ in range(2):
            assert ask(proxy, messages).is_success
            messages.append(QUESTION)
        first, second = engine.calls
        assert_served_is_stored(proxy, engine)
        view = proxy.turns("long")[-1]
    assert (first.body["messages"], second.body["messages"]) == (messages[:82], messages[:84])
    assert second.body["kv_transfer_params"]["prompt_token_ids"] == view.prompt_token_ids.tolist()
    assert (view.turn.outcome, view.messages) == (Outcome.EXACT, messages[:84])


def test_a_follow_up_that_cannot_fit_is_refused_before_it_is_rendered_and_counts_for_its_key(start_proxy):
    """The engine never sees it, the session goes on without it, and its key has used what the text has at least."""
    with running_fake_engine(Script(max_model_len=2_000)) as engine:
        proxy = start_proxy(engine.url, "--key-tokens-per-minute", "60000000")
        messages: list[dict[str, Any]] = [{"role": "user", "content": "Hello."}]
        engine.calls.clear()
        assert ask(proxy, messages).is_success
        long = {"role": "user", "content": "".join(map(str, range(100_000)))}
        body = {"model": "fake", "messages": [*messages, long]}
        refused = httpx.post(f"{proxy.session_v1('long')}/chat/completions", json=body, timeout=60)
        counted = httpx.post(f"{proxy.session_v1('long')}/messages/count_tokens", json=body, timeout=60)
        assert ask(proxy, [*messages, QUESTION]).is_success
        assert len(engine.calls) == 2
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "messages")
    assert error["message"].startswith("This model's maximum context length is 2000 tokens")
    assert counted.json()["input_tokens"] > 2_000
    outcomes = [(view.turn.outcome, view.turn.reason) for view in proxy.turns("long")]
    assert outcomes == [(Outcome.EXACT, None), (Outcome.ERROR, "context_length_exceeded"), (Outcome.EXACT, None)]
