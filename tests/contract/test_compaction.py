"""Compaction and context management with the unmodified SDKs of OpenAI and Anthropic.

What the model gets, what the client gets back, and that the next request goes on from it on the exact chain.
"""

from typing import Any

import anthropic
import httpx2
import openai
import pytest
from support.control_plane import metric
from support.proxies import ProxyAndEngine, RunningProxy
from support.waiting import wait_until
from turnwise_fake_engine import Reply, Rule

from turnwise.types import Outcome

SUMMARY = "The user looks for the key. It is under the mat."
FRAME = f"<summary>\n{SUMMARY}\n</summary>"
LOOK: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
LOOKED: Any = {"name": "look", "input_schema": {"type": "object", "properties": {}}}


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


@pytest.fixture
def engine(shared_engine: Any) -> Any:
    shared_engine.answer(Rule(reply=Reply(text=SUMMARY), contains="Write the summary and nothing else"))
    return shared_engine


def responses(base_url: str) -> Any:
    return openai.OpenAI(base_url=base_url, api_key="any", max_retries=0).responses


def messages(base_url: str) -> Any:
    return anthropic.Anthropic(base_url=base_url, api_key="any", max_retries=0).beta.messages


def sent(engine: Any) -> list[tuple[str, str]]:
    return [(each["role"], str(each["content"])) for each in engine.calls[-1].body["messages"]]


def assert_summary(proxy: RunningProxy, session_id: str, *, at: int) -> None:
    """The summary is known as that, has the model's own text, extends what it sums up, and the next turn goes on."""
    turns = [view.turn for view in proxy.turns(session_id)]
    assert turns[at].response["content"] == SUMMARY
    assert turns[at].role_reason == "compaction_prompt"
    assert turns[at].parent_turn_id == turns[at - 1].turn_id
    assert [turn.outcome for turn in turns] == [Outcome.EXACT] * len(turns)
    assert turns[-1].role == turns[0].role
    shown = httpx2.get(f"{proxy.v1}/sessions/{session_id}/turns").json()["data"]
    assert (shown[at]["role"], shown[at]["continued_by"]) == ("summary", [shown[at + 1]["turn_id"]])


@pytest.mark.parametrize("stream", [False, True])
def test_a_trigger_gets_one_item_from_which_the_next_request_goes_on(proxy, engine, session_id, *, stream):
    """As Codex asks: tools are in the prompt and none may be called; of before it keeps what the user has said."""
    client = responses(proxy.session_v1(session_id))
    given: list[Any] = [{"role": "user", "content": "Where is the key?"}]
    first = client.create(model="fake", input=given, tools=[LOOK])
    asked = [*given, *[item.to_dict() for item in first.output], {"type": "compaction_trigger"}]
    if stream:
        with client.stream(model="fake", input=asked, tools=[LOOK]) as events:
            seen = list(events)
        kinds = [event.type for event in seen]
        assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
        assert kinds[-2:] == ["response.output_item.done", "response.completed"]
        assert set(kinds[3:-2]) == {"response.compaction.compacting"}
        made = seen[-1].response
    else:
        made = client.create(model="fake", input=asked, tools=[LOOK])
    (item,) = made.output
    assert (made.status, item.type, made.incomplete_details) == ("completed", "compaction", None)
    assert SUMMARY not in item.encrypted_content
    assert engine.calls[-1].body["tool_choice"] == "none"
    assert client.retrieve(made.id).output == [item]

    after: list[Any] = [*given, item.to_dict(), {"role": "user", "content": "Go on."}]
    second = client.create(model="fake", input=after, tools=[LOOK])
    roles, texts = zip(*sent(engine), strict=True)
    assert roles == ("user", "user", "user")
    assert (texts[0], texts[2]) == ("Where is the key?", "Go on.")
    assert FRAME in texts[1]
    after += [*[each.to_dict() for each in second.output], {"role": "user", "content": "More."}]
    client.create(model="fake", input=after, tools=[LOOK])
    assert_summary(proxy, session_id, at=1)
    turns = [view.turn for view in proxy.turns(session_id)]
    assert turns[3].parent_turn_id == turns[2].turn_id


@pytest.mark.parametrize("by", ["items", "previous_response_id", "item_reference"])
def test_a_summary_is_named_by_its_item_its_response_or_a_reference(proxy, engine, session_id, by):
    client = responses(proxy.session_v1(session_id))
    first = client.create(model="fake", input="Where is the key?", instructions="Be short.")
    made = client.create(model="fake", input=[{"type": "compaction_trigger"}], previous_response_id=first.id)
    go_on: dict[str, Any] = {"input": [made.output[0].to_dict(), {"role": "user", "content": "Go on."}]}
    if by == "previous_response_id":
        go_on = {"input": "Go on.", "previous_response_id": made.id}
    elif by == "item_reference":
        go_on["input"][0] = {"type": "item_reference", "id": made.output[0].id}
    client.create(model="fake", **go_on)
    texts = [text for _, text in sent(engine)]
    assert texts[-1] == "Go on."
    assert FRAME in texts[-2]
    assert texts[:-2] == (["Where is the key?"] if by == "previous_response_id" else [])


def test_the_route_of_compaction_returns_the_window_that_the_next_request_begins_with(proxy, engine):
    """No request names a session: the item does, so what follows from the summary is in the session of the summary."""
    client = responses(proxy.v1)
    question = f"Where is the key? {'x' * 5_000}"
    given: list[Any] = [{"role": "user", "content": question}]
    first = client.create(model="fake", input=given)
    given += [*[item.to_dict() for item in first.output], {"role": "user", "content": "And the mat?"}]
    window = client.compact(model="fake", input=given)
    assert (window.object, window.usage.total_tokens > 0) == ("response.compaction", True)
    assert [item.type for item in window.output] == ["message", "message", "compaction"]
    texts = [item.content[0].text for item in window.output[:2]]
    assert texts == [question, "And the mat?"]
    raw = client.with_raw_response.create(
        model="fake",
        input=[*[item.to_dict(warnings=False) for item in window.output], {"role": "user", "content": "Go on."}],
    )
    assert FRAME in sent(engine)[2][1]
    assert_summary(proxy, raw.headers["x-session-id"], at=1)
    again = client.compact(model="fake", previous_response_id=first.id)
    assert [item.type for item in again.output] == ["message", "compaction"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_beyond_its_threshold_stands_behind_the_item_of_a_summary(proxy, engine, stream):
    """`context_management` of Responses: two samplings, of which the second has the first in its prompt."""
    client = responses(proxy.v1)
    engine.answer(Rule(reply=Reply(text="Done."), contains="<summary>", count=1))
    given: list[Any] = [{"role": "user", "content": "Where is the key?"}]
    wanted: Any = {"model": "fake", "context_management": [{"type": "compaction", "compact_threshold": 60}]}
    first = client.create(input=given, **wanted)
    assert [item.type for item in first.output] == ["message"]
    given += [*[item.to_dict() for item in first.output], {"role": "user", "content": "And the mat? " * 8}]
    if stream:
        with client.stream(input=given, **wanted) as events:
            seen = list(events)
        made = seen[-1].response
        added = [event for event in seen if event.type == "response.output_item.added"]
        assert [event.output_index for event in added] == [0, 1]
        assert [event.sequence_number for event in seen] == list(range(len(seen)))
    else:
        made = client.create(input=given, **wanted)
    assert [item.type for item in made.output] == ["compaction", "message"]
    assert made.output_text == "Done."
    assert [role for role, _ in sent(engine)] == ["user"]
    assert FRAME in sent(engine)[0][1]
    given += [*[item.to_dict() for item in made.output], {"role": "user", "content": "More."}]
    raw = client.with_raw_response.create(input=given, model="fake")
    assert [role for role, _ in sent(engine)] == ["user", "assistant", "user"]
    session_id = raw.headers["x-session-id"]
    assert_summary(proxy, session_id, at=1)
    turns = [view.turn for view in proxy.turns(session_id)]
    assert [turn.turn_id for turn in turns[2:]] == [made.id, raw.parse().id]
    assert turns[3].parent_turn_id == made.id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pauses", [False, True])
def test_the_edit_compact_puts_a_block_before_a_reply_or_in_its_place(proxy, engine, session_id, *, pauses, stream):
    client = messages(f"{proxy.url}/sessions/{session_id}")
    engine.answer(Rule(reply=Reply(text=SUMMARY), contains="Say it in short", count=1))
    engine.answer(Rule(reply=Reply(text="Done."), contains="<summary>", count=1))
    given: list[Any] = [{"role": "user", "content": "Where is the key?"}]
    first = client.create(model="fake", max_tokens=50, messages=given)
    given += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And the mat? " * 8}]
    edit: Any = {
        "type": "compact_20260112",
        "trigger": {"type": "input_tokens", "value": 60},
        "instructions": "Say it in short.",
        "pause_after_compaction": pauses,
    }
    wanted: Any = {"model": "fake", "max_tokens": 50, "context_management": {"edits": [edit]}}
    if stream:
        with client.stream(messages=given, **wanted) as events:
            made = events.get_final_message()
    else:
        made = client.create(messages=given, **wanted)
    assert made.context_management.applied_edits == []
    assert made.content[0].content == SUMMARY
    assert [block.type for block in made.content] == ["compaction"] if pauses else ["compaction", "text"]
    assert made.stop_reason == ("compaction" if pauses else "end_turn")
    kinds = [each.type for each in made.usage.iterations]
    assert kinds == ["compaction"] if pauses else ["compaction", "message"]
    assert (made.usage.output_tokens == 0) is pauses

    given += [{"role": "assistant", "content": made.content}, {"role": "user", "content": "Go on."}]
    client.create(model="fake", max_tokens=50, messages=given)
    assert [role for role, _ in sent(engine)] == (["user"] if pauses else ["user", "assistant", "user"])
    assert FRAME in sent(engine)[0][1]
    assert "key?" not in str(sent(engine))
    assert_summary(proxy, session_id, at=1)


def test_a_compaction_on_demand_is_a_block_from_which_messages_go_on(proxy, engine):
    client = messages(proxy.url)
    given: list[Any] = [{"role": "user", "content": "Where is the key?"}]
    first = client.create(model="fake", max_tokens=50, messages=given)
    given += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And the mat?"}]
    made = client.create(model="fake", max_tokens=50, messages=given, compaction={"type": "summarize"})
    assert [(block.type, block.content) for block in made.content] == [("compaction", SUMMARY)]
    assert made.stop_reason == "compaction"
    on: list[Any] = [{"role": "assistant", "content": made.content}, {"role": "user", "content": "Go on."}]
    raw = client.with_raw_response.create(model="fake", max_tokens=50, messages=on)
    assert_summary(proxy, raw.headers["x-session-id"], at=1)


@pytest.mark.parametrize("stream", [False, True])
def test_older_tool_results_are_cleared_and_the_reply_says_how_many(proxy, shared_engine, session_id, *, stream):
    client = messages(f"{proxy.url}/sessions/{session_id}")
    given: list[Any] = [{"role": "user", "content": "Look."}]
    for number in range(3):
        use = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {"at": number}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result {number} " + "very " * 20}
        given += [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    edit: Any = {
        "type": "clear_tool_uses_20250919",
        "trigger": {"type": "tool_uses", "value": 3},
        "keep": {"type": "tool_uses", "value": 1},
        "clear_tool_inputs": True,
    }
    wanted: Any = {"model": "fake", "messages": given, "tools": [LOOKED], "context_management": {"edits": [edit]}}
    if stream:
        with client.stream(max_tokens=50, **wanted) as events:
            made = events.get_final_message()
    else:
        made = client.create(max_tokens=50, **wanted)
    (applied,) = made.context_management.applied_edits
    assert (applied.type, applied.cleared_tool_uses) == ("clear_tool_uses_20250919", 2)
    assert applied.cleared_input_tokens > 0
    results = [text for role, text in sent(shared_engine) if role == "tool"]
    assert [text[:8] for text in results] == ["[The res", "[The res", "result 2"]
    calls = [each["tool_calls"][0]["function"]["arguments"] for each in shared_engine.calls[-1].body["messages"][1::2]]
    assert calls == ["{}", "{}", '{"at":2}']
    counted = client.count_tokens(**wanted)
    assert counted.context_management is not None
    cleared = counted.context_management.original_input_tokens - counted.input_tokens
    assert cleared == applied.cleared_input_tokens
    edit["clear_at_least"] = {"type": "input_tokens", "value": 10_000}
    assert client.create(max_tokens=50, **wanted).context_management.applied_edits == []


def test_thinking_is_cleared_also_from_the_ids_of_earlier_turns(proxy, shared_engine, session_id):
    """The chain has what was sampled, thinking included, so a call whose older thinking is cleared starts another."""
    client = messages(f"{proxy.url}/sessions/{session_id}")
    shared_engine.answer(Rule(reply=Reply(text="Yes.", reasoning="A long thought.")))
    given: list[Any] = [{"role": "user", "content": "One?"}]
    keep: dict[str, Any] = {}
    for question in ("Two?", "Three?", "Four?"):
        edits: Any = {"edits": [{"type": "clear_thinking_20251015", **keep}]}
        made = client.create(model="fake", max_tokens=50, messages=given, context_management=edits)
        given += [{"role": "assistant", "content": made.content}, {"role": "user", "content": question}]
        keep = {"keep": "all"} if question == "Three?" else {}
    turns = [view.turn for view in proxy.turns(session_id)]
    assert [turn.parent_turn_id for turn in turns] == [None, turns[0].turn_id, turns[1].turn_id]
    made = client.create(model="fake", max_tokens=50, messages=given, context_management=edits)
    edits = {"edits": [{"type": "clear_thinking_20251015"}]}
    made = client.create(model="fake", max_tokens=50, messages=given, context_management=edits)
    (applied,) = made.context_management.applied_edits
    assert (applied.type, applied.cleared_thinking_turns) == ("clear_thinking_20251015", 2)
    last = proxy.turns(session_id)[-1].turn
    assert (last.parent_turn_id, last.reason, last.outcome) == (None, "edited_history", Outcome.RETOKENISED)
    thoughts = [
        each.get("reasoning") for each in shared_engine.calls[-1].body["messages"] if each["role"] == "assistant"
    ]
    assert thoughts == [None, None, "A long thought."]


def test_what_cannot_be_done_is_refused_by_its_name(proxy, shared_engine):
    assert shared_engine.url
    hello = {"model": "fake", "input": "hello"}
    said = {"model": "fake", "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}]}
    edit = {"type": "clear_tool_uses_20250919"}
    trigger = {"type": "compaction_trigger"}
    for path, body, why in (
        ("responses", {**hello, "input": [trigger, {"role": "user", "content": "x"}]}, "must be the last item"),
        ("responses", {**hello, "input": [{"type": "compaction", "encrypted_content": "gAAA"}]}, "not this proxy's"),
        ("responses", {**hello, "context_management": [{"type": "truncation"}]}, "'type': 'truncation'"),
        ("responses", {**hello, "context_management": [{"type": "compaction", "compact_threshold": "9"}]}, "'9'"),
        ("responses/compact", {**hello, "stream": True}, "`stream` is not served here"),
        ("messages", {**said, "context_management": {"edits": [{"type": "clear_all"}]}}, "'clear_all'"),
        ("messages", {**said, "context_management": {"edits": [{**edit, "clear_results": 1}]}}, "'clear_results'"),
        ("messages", {**said, "context_management": {"edits": [{**edit, "keep": 3}]}}, "`keep` 3"),
        ("messages", {**said, "compaction": {"type": "drop"}}, "of type `summarize`"),
        ("messages", {**said, "compaction": {"type": "summarize"}, "context_management": {}}, "not both"),
    ):
        answer = httpx2.post(f"{proxy.v1}/{path}", json=body)
        assert answer.status_code == 400, (path, body)
        assert why in answer.json()["error"]["message"]


def test_a_summary_without_text_is_an_error_that_clients_retry(proxy, shared_engine, session_id):
    shared_engine.answer(Rule(reply=Reply(text="", reasoning="What was it?")))
    body = {"model": "fake", "input": [{"role": "user", "content": "x"}, {"type": "compaction_trigger"}]}
    url = f"{proxy.session_v1(session_id)}/responses"
    answer = httpx2.post(url, json=body)
    assert (answer.status_code, answer.json()["error"]["message"].endswith("without a text; retry")) == (503, True)
    assert "response.failed" in httpx2.post(url, json={**body, "stream": True}).text


LONG = {
    "model": "fake",
    "stream": True,
    "input": [{"role": "user", "content": "Where is the key? " * 9}],
    "context_management": [{"type": "compaction", "compact_threshold": 60}],
}


def test_a_stream_whose_summary_takes_long_is_kept_alive(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--stream-keep-alive-seconds", "0.05")
    fake_engine.answer(Rule(reply=Reply(text=SUMMARY, pace_seconds=0.05), contains="Write the summary"))
    fake_engine.answer(Rule(reply=Reply(text="Done."), contains="<summary>"))
    events = httpx2.post(f"{proxy.session_v1('kept')}/responses", json=LONG, timeout=60).text.split("\n\n")
    assert events[:2] == [": keep-alive"] * 2, "the reply begins after its summary"
    assert "response.completed" in events[-2]
    assert [view.turn.response["content"] for view in proxy.turns("kept")] == [SUMMARY, "Done."]


def test_a_client_that_leaves_while_its_summary_is_sampled_leaves_an_aborted_turn_and_no_call(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--stream-keep-alive-seconds", "0.05")
    fake_engine.answer(Rule(reply=Reply(text=SUMMARY, pace_seconds=0.2), contains="Write the summary"))
    with httpx2.stream("POST", f"{proxy.session_v1('left')}/responses", json=LONG, timeout=60) as answer:
        assert next(answer.iter_text()).startswith(": keep-alive")
    wait_until(
        lambda: bool(proxy.turns("left")) and metric(proxy, "turnwise_calls_in_flight") == 0, "the call to be over"
    )
    (view,) = proxy.turns("left")
    assert (view.turn.outcome, view.turn.reason) == (Outcome.ABORTED, "client_left")
    of_engine = {"engine": fake_engine.url}
    wait_until(lambda: metric(proxy, "turnwise_engine_calls", **of_engine) == 0, "the engine to be free")
