"""Tools and items of the Responses API other than plain functions, as Codex and the AI SDK send them."""

import json
from typing import Any

import httpx2
import openai
import pytest
from support.proxies import ProxyAndEngine, RunningProxy
from turnwise_fake_engine import Reply, Rule, ToolCall

from turnwise.types import Outcome

SPAWN = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents.",
    "tools": [{"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {}}}],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'},
}
TEXT = 'a "patch"\n+ é'
REPLY = Reply(
    text="Working.",
    tool_calls=[
        ToolCall(name="agents__spawn", arguments={"task": "t"}),
        ToolCall(name="apply_patch", arguments={"input": TEXT}),
    ],
)


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


def assert_one_exact_chain(proxy: RunningProxy, session_id: str, num_turns: int) -> None:
    turns = [view.turn for view in proxy.turns(session_id)]
    assert [(turn.outcome, turn.reason) for turn in turns] == [(Outcome.EXACT, None)] * num_turns
    assert len({turn.chain_id for turn in turns}) == 1


@pytest.mark.parametrize("stream", [False, True])
def test_namespaces_and_freeform_tools_are_returned_under_the_clients_names(
    proxy, shared_engine, session_id, *, stream
):
    """The engine sees functions; the client sees its own tools; the next call stays on the chain."""
    shared_engine.answer(Rule(reply=REPLY, contains="first", count=1))
    client = openai.OpenAI(base_url=proxy.session_v1(session_id), api_key="any", max_retries=0)
    tools: Any = [SPAWN, PATCH, {"type": "web_search"}, {"type": "local_shell"}]
    given: list[Any] = [{"role": "user", "content": "first"}]
    asked: Any = {"model": "fake", "tools": tools, "include": ["reasoning.encrypted_content"], "store": False}
    if stream:
        with client.responses.stream(input=given, **asked) as events:
            seen = list(events)
        made = seen[-1].response
        texts = [each.input for each in seen if each.type == "response.custom_tool_call_input.done"]
        assert texts == [TEXT]
    else:
        raw = client.responses.with_raw_response.create(input=given, **asked)
        assert raw.headers["x-turnwise-dropped-tools"] == "web_search, local_shell"
        made = raw.parse()
    _, spawn, patch = made.output
    assert (spawn.type, spawn.namespace, spawn.name, json.loads(spawn.arguments)) == (
        "function_call",
        "agents",
        "spawn",
        {"task": "t"},
    )
    assert (patch.type, patch.name, patch.input) == ("custom_tool_call", "apply_patch", TEXT)
    sent = [tool["function"] for tool in shared_engine.calls[-1].body["tools"]]
    assert [function["name"] for function in sent] == ["agents__spawn", "apply_patch"]
    assert 'start: "x"' in sent[1]["description"]
    given += [item.model_dump(exclude={"parsed_arguments"}) for item in made.output]
    given += [
        {"type": "function_call_output", "call_id": spawn.call_id, "output": "ok"},
        {"type": "custom_tool_call_output", "call_id": patch.call_id, "output": "patched"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAA"},
    ]
    client.responses.create(input=given, **asked)
    assert_one_exact_chain(proxy, session_id, 2)
    roles = [message["role"] for message in proxy.turns(session_id)[-1].messages]
    assert roles == ["user", "assistant", "tool", "tool"]


def test_shell_calls_of_an_earlier_reply_are_accepted(proxy, shared_engine, session_id):
    client = openai.OpenAI(base_url=proxy.session_v1(session_id), api_key="any", max_retries=0)
    given: list[Any] = [
        {"role": "user", "content": "list"},
        {
            "type": "local_shell_call",
            "id": "ls_1",
            "call_id": "call_1",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "id": "call_1", "output": "file"},
    ]
    client.responses.create(model="fake", input=given)
    call, result = shared_engine.calls[-1].body["messages"][1:]
    assert json.loads(call["tool_calls"][0]["function"]["arguments"])["command"] == ["ls"]
    assert (result["role"], result["tool_call_id"], result["content"]) == ("tool", "call_1", "file")


def test_an_item_reference_is_resolved_from_the_stored_turn(proxy, shared_engine, session_id):
    """By default the AI SDK sends ids in place of the items of a reply."""
    shared_engine.answer(Rule(reply=REPLY, contains="first", count=1))
    client = openai.OpenAI(base_url=proxy.session_v1(session_id), api_key="any", max_retries=0)
    asked: Any = {"model": "fake", "tools": [SPAWN, PATCH]}
    given: list[Any] = [{"role": "user", "content": "first"}]
    made = client.responses.create(input=given, **asked)
    given += [{"type": "item_reference", "id": item.id} for item in made.output]
    given += [
        {"type": "function_call_output", "call_id": made.output[1].call_id, "output": "ok"},
        {"type": "custom_tool_call_output", "call_id": made.output[2].call_id, "output": "ok"},
    ]
    client.responses.create(input=given, **asked)
    assert_one_exact_chain(proxy, session_id, 2)


def test_a_session_key_cannot_read_a_response_of_another_session(proxy, shared_engine, session_id):
    """`previous_response_id` and an item reference are both answered as unknown."""
    assert shared_engine.url
    other = openai.OpenAI(base_url=proxy.session_v1(f"{session_id}-other"), api_key="any", max_retries=0)
    secret = other.responses.create(model="fake", input="the secret")
    key = httpx2.post(f"{proxy.v1}/sessions", json={"session_id": session_id}).json()["api_key"]
    for base_url in (proxy.v1, proxy.session_v1(session_id)):
        client = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0)
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            client.responses.create(model="fake", input="and?", previous_response_id=secret.id)
        reference: Any = [{"type": "item_reference", "id": secret.output[0].id}]
        with pytest.raises(openai.NotFoundError, match="is not stored"):
            client.responses.create(model="fake", input=reference)
        own = client.responses.create(model="fake", input="mine")
        client.responses.create(model="fake", input="and?", previous_response_id=own.id)
    assert not any("secret" in str(view.messages) for view in proxy.turns(session_id))


def test_a_stored_response_is_returned_by_its_id_to_who_may_continue_it(proxy, shared_engine, session_id):
    shared_engine.answer(Rule(reply=Reply(text="Working.", tool_calls=[ToolCall(name="look", arguments={"a": 1})])))
    client = openai.OpenAI(base_url=proxy.session_v1(session_id), api_key="any", max_retries=0)
    tools: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
    made = client.responses.create(model="fake", input="first", tools=tools, temperature=0.5)
    read = client.responses.retrieve(made.id)
    assert [item.model_dump() for item in read.output] == [item.model_dump() for item in made.output]
    for field in ("id", "status", "created_at", "model", "usage", "temperature", "incomplete_details", "error"):
        assert getattr(read, field) == getattr(made, field), field
    assert openai.OpenAI(base_url=proxy.v1, api_key="any").responses.retrieve(made.id).id == made.id
    key = httpx2.post(f"{proxy.v1}/sessions", json={"session_id": f"{session_id}-other"}).json()["api_key"]
    hidden = client.responses.create(model="fake", input="second", store=False)
    chat = httpx2.post(
        f"{proxy.v1}/chat/completions", json={"model": "fake", "messages": [{"role": "user", "content": "x"}]}
    )
    for base_url, api_key, response_id in (
        (proxy.v1, key, made.id),  # of another session's key
        (proxy.session_v1(f"{session_id}-other"), "any", made.id),
        (proxy.v1, "any", hidden.id),  # the request said store: false
        (proxy.v1, "any", chat.json()["id"]),
        (proxy.v1, "any", "resp_unknown"),
        (proxy.v1, "any", "resp_\0"),
    ):
        stranger = openai.OpenAI(base_url=base_url, api_key=api_key, max_retries=0)
        with pytest.raises((openai.NotFoundError, openai.PermissionDeniedError)):
            stranger.responses.retrieve(response_id)
    assert httpx2.delete(f"{proxy.v1}/sessions/{session_id}").is_success
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(made.id)


def test_what_a_conversation_loses_is_counted_by_type_and_a_path_may_begin_with_two_slashes(
    proxy, shared_engine, session_id
):
    """A base URL that ends with a slash gives such paths."""
    assert shared_engine.url
    given = [{"type": "mcp_list_tools", "id": "w"}, {"role": "user", "content": "Hi."}]
    answer = httpx2.post(f"{proxy.url}//sessions/{session_id}/v1/responses", json={"model": "fake", "input": given})
    assert answer.is_success, answer.text
    blocks = [{"type": "container_upload", "file_id": "x"}, {"type": "my_own", "a": 1}, {"type": "text", "text": "Hi."}]
    asked = [
        {"role": "user", "content": "Hi."},
        {"role": "assistant", "content": blocks},
        {"role": "user", "content": "?"},
    ]
    body = {"model": "fake", "max_tokens": 9, "messages": asked}
    assert httpx2.post(f"{proxy.url}//v1/messages", json=body).is_success
    assert len(proxy.turns(session_id)) == 1
    metrics = httpx2.get(f"{proxy.url}/metrics").text
    for kind in ("mcp_list_tools", "container_upload", "other"):
        assert f'turnwise_dropped_items_total{{type="{kind}"}} 1.0' in metrics
