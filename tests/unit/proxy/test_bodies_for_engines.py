"""What every translated body that reaches an engine holds: results beside their calls, ids, names and choices once.

Chat templates print these. Some of them raise for a conversation without this form, and then for each later call of it.
"""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.features.formats.gemini import Gemini
from proxy.features.formats.messages import Messages
from proxy.features.formats.responses import Responses
from proxy.features.formats.translated import Translated
from turnwise.errors import InvalidRequest

Json = dict[str, Any]
TEXTS = {Messages: "text", Responses: "input_text"}


def body_of(dialect: Translated, **body: Any) -> Json:
    whole = {"model": "m", "stream": False, "max_tokens": 9} if isinstance(dialect, Messages | Gemini) else {}
    return dialect.parse({**whole, **body}).body


def check(body: Json) -> None:
    """Check one body by the rules that this file is about."""
    calls: list[str] = []
    open_calls: dict[str, str] = {}
    for before, message in itertools.pairwise([{"role": "none"}, *body["messages"]]):
        if message["role"] == "assistant":
            open_calls = {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
            assert len(open_calls) == len(message.get("tool_calls") or ())
            calls += open_calls
        elif message["role"] == "tool":
            assert before["role"] in ("assistant", "tool")
            assert set(message) == {"role", "tool_call_id", "content"}
            assert open_calls.pop(message["tool_call_id"], None) is not None, "a result has its call, once"
    assert all(isinstance(call_id, str) and call_id for call_id in calls)
    assert len(set(calls)) == len(calls)
    names = [tool["function"]["name"] for tool in body.get("tools") or ()]
    assert len(set(names)) == len(names)
    choice = body.get("tool_choice")
    assert not isinstance(choice, dict) or choice["function"]["name"] in names


CALL_IDS = st.sampled_from(["a", "b", "call_1", "call_2"])
REPLIES = st.lists(st.tuples(CALL_IDS, st.sampled_from(["look", "write"])), min_size=1, max_size=4)


@st.composite
def rounds(draw: Any) -> list[tuple[list[tuple[str, str]], list[int | str]]]:
    """Return replies with calls, and what follows each: the results by their calls' numbers, with texts between."""
    found = []
    for calls in draw(st.lists(REPLIES, min_size=1, max_size=4)):
        follow: list[int | str] = [*range(len(calls)), *draw(st.lists(st.sampled_from(["by the way", "go on"])))]
        found.append((calls, draw(st.permutations(follow))))
    return found


def in_messages(replies: list[Any], role: str) -> Json:
    messages: list[Json] = [{"role": "user", "content": "go"}]
    for number, (calls, follow) in enumerate(replies):
        used = [{"type": "tool_use", "id": call_id, "name": name, "input": {"n": number}} for call_id, name in calls]
        messages.append({"role": "assistant", "content": used})
        for each in follow:
            if isinstance(each, str):
                messages.append({"role": role, "content": each})
            else:
                result = {"type": "tool_result", "tool_use_id": calls[each][0], "content": f"{number}.{each}"}
                messages.append({"role": "user", "content": [result]})
    return {"messages": messages}


def in_responses(replies: list[Any], role: str) -> Json:
    items: list[Json] = [{"role": "user", "content": "go"}]
    for number, (calls, follow) in enumerate(replies):
        items += [{"type": "function_call", "call_id": own, "name": name, "arguments": "{}"} for own, name in calls]
        for each in follow:
            if isinstance(each, str):
                items.append({"role": role, "content": each})
            else:
                output = f"{number}.{each}"
                items.append({"type": "function_call_output", "call_id": calls[each][0], "output": output})
    return {"input": items}


def in_gemini(replies: list[Any], has_ids: tuple[bool, bool]) -> Json:
    contents: list[Json] = [{"role": "user", "parts": [{"text": "go"}]}]
    for number, (calls, follow) in enumerate(replies):
        used = [{"name": name} | ({"id": call_id} if has_ids[0] else {}) for call_id, name in calls]
        contents.append({"role": "model", "parts": [{"functionCall": one} for one in used]})
        for each in follow:
            if isinstance(each, str):
                contents.append({"role": "user", "parts": [{"text": each}]})
            else:
                call_id, name = calls[each]
                named = {"name": name, "response": {"output": f"{number}.{each}"}} | (
                    {"id": call_id} if has_ids[1] else {}
                )
                contents.append({"role": "user", "parts": [{"functionResponse": named}]})
    return {"contents": contents}


@given(rounds(), st.sampled_from(["user", "system"]), st.tuples(st.booleans(), st.booleans()))
def test_every_body_has_each_result_behind_its_call_and_each_id_once(replies, role, has_ids):
    """Ids may be missing and may repeat, in one reply and in two; texts may stand between the results."""
    num_calls = sum(len(calls) for calls, _ in replies)
    for dialect, asked in (
        (Messages(), in_messages(replies, role)),
        (Responses(), in_responses(replies, role)),
        (Gemini(), in_gemini(replies, has_ids)),
    ):
        body = body_of(dialect, **asked)
        check(body)
        results = [message for message in body["messages"] if message["role"] == "tool"]
        assert len(results) == num_calls
        # A result is of the reply before it. Where its reply names each call once, it is of the call that it names.
        owners = {
            call["id"]: (number, calls[place])
            for number, (calls, message) in enumerate(
                zip(
                    (calls for calls, _ in replies),
                    (message for message in body["messages"] if message["role"] == "assistant"),
                    strict=True,
                )
            )
            for place, call in enumerate(message["tool_calls"])
        }
        for result in results:
            number, place = map(int, result["content"].split("."))
            calls, _ = replies[number]
            owner, called = owners[result["tool_call_id"]]
            assert owner == number
            is_by_id = not isinstance(dialect, Gemini) or all(has_ids)
            key = (lambda call: call[0]) if is_by_id else (lambda call: call[1])
            assert key(called) == key(calls[place])


def results_of(contents: list[tuple[str, list[Json]]]) -> list[tuple[str, int]]:
    """Return the results of a conversation of Google's in their order, each with the number of its call."""
    body = body_of(Gemini(), contents=[{"role": role, "parts": parts} for role, parts in contents])
    check(body)
    calls = [call["id"] for message in body["messages"] for call in message.get("tool_calls") or ()]
    return [(each["content"], calls.index(each["tool_call_id"])) for each in body["messages"] if each["role"] == "tool"]


def call(name: str, call_id: str | None = None) -> Json:
    return {"functionCall": {"name": name, "args": {}} | ({"id": call_id} if call_id else {})}


def result(text: str, name: str | None, call_id: str | None = None) -> Json:
    named = {"id": call_id, "name": name}
    return {"functionResponse": {"response": {"result": text}} | {key: value for key, value in named.items() if value}}


@pytest.mark.parametrize(
    ("calls", "results", "expected"),
    [
        ([call("A"), call("A")], [result("1", "A", "x"), result("2", "A", "y")], [("1", 0), ("2", 1)]),
        ([call("A"), call("B")], [result("2", "B", "x"), result("1", "A", "y")], [("2", 1), ("1", 0)]),
        ([call("A")], [result("1", "")], [("1", 0)]),
        ([call("A"), call("B")], [result("?", ""), result("1", "A")], [("?", 1), ("1", 0)]),
        ([call("A", "x")], [result("1", "x")], [("1", 0)]),
        ([call("A", "x"), call("A", "y")], [result("2", "y"), result("1", "x")], [("2", 1), ("1", 0)]),
        ([call("A", "x"), call("A", "x")], [result("1", "A", "x"), result("2", "A", "x")], [("1", 0), ("2", 1)]),
        ([call("A", "x"), call("B", "x")], [result("1", "A"), result("2", "B")], [("1", 0), ("2", 1)]),
        ([call("A", "call_2"), call("A")], [result("1", "A"), result("2", "A")], [("1", 0), ("2", 1)]),
        ([call("A"), call("A", "call_1")], [result("2", "A", "call_1"), result("1", "A")], [("2", 1), ("1", 0)]),
        ([call("A")], [result("1", "renamed")], [("1", 0)]),
    ],
)
def test_a_result_of_google_s_finds_its_call_by_id_then_by_name_then_by_order(calls, results, expected):
    """An id that no waiting call has counts as none, as does an empty name; a name may be the call's id."""
    together: list[tuple[str, list[Json]]] = [("user", [{"text": "go"}]), ("model", calls), ("user", results)]
    assert results_of(together) == expected
    apart = [*together[:2], *(("user", [each]) for each in results)]
    assert results_of(apart) == expected


def test_what_a_user_says_between_the_results_of_parallel_calls_stands_behind_them():
    said = {"role": "user", "content": "by the way"}
    roles = ["user", "assistant", "tool", "tool", "user"]
    items = [
        {"role": "user", "content": "go"},
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "b", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "a", "output": "A"},
        said,
        {"type": "function_call_output", "call_id": "b", "output": "B"},
    ]
    found = body_of(Responses(), input=items)["messages"]
    assert [message["role"] for message in found] == roles
    assert [message["content"] for message in found[2:]] == ["A", "B", "by the way"]
    # A request that continues a stored reply has no call: its results still come first, behind its instructions.
    continued = body_of(Responses(), input=items[3:], instructions="Be kind.")["messages"]
    assert [message["content"] for message in continued] == ["Be kind.", "A", "B", "by the way"]
    thread = [{"type": "tool_result", "tool_use_id": name, "content": name.upper()} for name in "ab"]
    split = [{"role": "user", "content": [thread[0]]}, {"role": "system", "content": "Note."}]
    found = body_of(Messages(), messages=[*split, {"role": "user", "content": [thread[1]]}])["messages"]
    assert [message["content"] for message in found] == ["A", "B", "Note."]


def test_text_that_a_reply_has_after_its_call_is_of_the_same_message():
    """Its items go back in the order of the stream; as two messages they would not extend the stored turn."""
    items = [
        {"type": "function_call", "call_id": "a", "name": "look", "arguments": "{}"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call_output", "call_id": "a", "output": "A"},
    ]
    reply, _ = body_of(Responses(), input=items)["messages"]
    assert (reply["content"], reply["tool_calls"][0]["id"]) == ("I look.", "a")


LOOK: Json = {"type": "object", "properties": {"q": {"type": "string"}}}
NAMED = {
    "messages": lambda name, schema: {"name": name, "input_schema": schema},
    "responses": lambda name, schema: {"type": "function", "name": name, "parameters": schema},
    "gemini": lambda name, schema: {"functionDeclarations": [{"name": name, "parametersJsonSchema": schema}]},
}
CHOSEN = {
    "messages": lambda name: {"tool_choice": {"type": "tool", "name": name}},
    "responses": lambda name: {"tool_choice": {"type": "function", "name": name}},
    "gemini": lambda name: {"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": [name]}}},
}
SAID: dict[str, Json] = {
    "messages": {"messages": [{"role": "user", "content": "Hi."}]},
    "responses": {"input": "Hi."},
    "gemini": {"contents": [{"parts": [{"text": "Hi."}]}]},
}
DIALECTS: list[Translated] = [Messages(), Responses(), Gemini()]


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.name)
def test_every_body_has_each_tool_once_and_chooses_one_of_them(dialect):
    tool, chosen, said = NAMED[dialect.name], CHOSEN[dialect.name], SAID[dialect.name]
    body = body_of(dialect, **said, tools=[tool("look", LOOK), tool("look", LOOK)], **chosen("look"))
    check(body)
    assert (len(body["tools"]), body["tool_choice"]["function"]) == (1, {"name": "look"})
    with pytest.raises(InvalidRequest, match="two different tools have the name 'look'"):
        body_of(dialect, **said, tools=[tool("look", LOOK), tool("look", {"type": "object"})])
    with pytest.raises(InvalidRequest, match="'write' is none of the tools look"):
        body_of(dialect, **said, tools=[tool("look", LOOK)], **chosen("write"))


def namespace(name: str, *tools: str) -> Json:
    return {"type": "namespace", "name": name, "tools": [NAMED["responses"](tool, LOOK) for tool in tools]}


@pytest.mark.parametrize(
    ("tools", "names"),
    [
        ([namespace("a", "b__c"), namespace("a__b", "c")], "a.b__c and a__b.c"),
        ([namespace("a", "b__c"), NAMED["responses"]("a__b__c", LOOK)], "a.b__c and a__b__c"),
        ([{"type": "custom", "name": "a__b__c"}, namespace("a", "b__c")], "a__b__c and a.b__c"),
    ],
)
def test_two_tools_that_would_get_one_name_are_refused_by_both_names(tools, names):
    """Calls of both would go to the later one."""
    with pytest.raises(InvalidRequest, match=f"the tools {names} are both 'a__b__c' here"):
        body_of(Responses(), input="Hi.", tools=tools)


@pytest.mark.parametrize(
    ("hosted", "choice"),
    [
        ({"type": "web_search"}, {"type": "web_search"}),
        ({"type": "web_search_preview_2025_03_11"}, {"type": "web_search_preview"}),
        ({"type": "mcp", "server_label": "x"}, {"type": "mcp", "server_label": "x"}),
        ({"type": "shell"}, {"type": "shell"}),
        ({"type": "apply_patch"}, {"type": "apply_patch"}),
        ({"type": "computer_use_preview"}, {"type": "computer_use_preview"}),
        ({"type": "file_search"}, {"type": "allowed_tools", "mode": "required", "tools": [{"type": "file_search"}]}),
    ],
    ids=lambda each: each["type"],
)
def test_the_choice_of_a_hosted_tool_goes_with_the_tool_in_responses(hosted, choice):
    tools = [NAMED["responses"]("look", LOOK), hosted]
    call = Responses().parse({"input": "Hi.", "tools": tools, "tool_choice": choice})
    check(call.body)
    assert "tool_choice" not in call.body
    assert call.dropped_tools == [hosted["type"]]
    if choice["type"] != "allowed_tools":  # the choice of a tool that was not sent is a mistake
        with pytest.raises(InvalidRequest, match="a tool choice is"):
            Responses().parse({"input": "Hi.", "tools": tools[:1], "tool_choice": choice})


@pytest.mark.parametrize("name", ["web_search", "bash", "str_replace_based_edit_tool"])
def test_the_choice_of_a_hosted_tool_goes_with_the_tool_in_messages(name):
    hosted = {"type": f"{name}_20250305", "name": name}
    choice = {"type": "tool", "name": name, "disable_parallel_tool_use": True}
    asked = {**SAID["messages"], "max_tokens": 9, "tool_choice": choice}
    call = Messages().parse({**asked, "tools": [NAMED["messages"]("look", LOOK), hosted]})
    check(call.body)
    assert ("tool_choice" in call.body, call.body["parallel_tool_calls"]) == (False, False)
    assert call.dropped_tools == [name]
    own = Messages().parse({**asked, "tools": [NAMED["messages"](name, LOOK), hosted]})  # a tool of the client's
    assert own.body["tool_choice"]["function"] == {"name": name}


@pytest.mark.parametrize("strict", [True, False])
def test_strict_of_a_tool_reaches_the_engine(strict):
    for dialect in DIALECTS[:2]:
        tool = NAMED[dialect.name]("look", LOOK) | {"strict": strict}
        assert body_of(dialect, **SAID[dialect.name], tools=[tool])["tools"][0]["function"]["strict"] is strict
        plain = body_of(dialect, **SAID[dialect.name], tools=[NAMED[dialect.name]("look", LOOK)])
        assert "strict" not in plain["tools"][0]["function"]
