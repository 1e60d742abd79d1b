"""What edits of `context_management` leave of a conversation, and what stands for a summary in the next one."""

import itertools
from typing import Any

import pytest

from proxy.features.compaction.edits import ClearThinking, ClearToolUses, Compact, read_edits, read_thresholds
from proxy.features.compaction.messages import ManagedMessages, read_messages
from proxy.features.compaction.responses import ManagedResponses, read_items
from proxy.features.compaction.texts import PROMPT, framed, seal, unseal, with_prompt, without_prompt
from proxy.features.roles.chains import read_root
from proxy.features.roles.prompts import COMPACTION
from turnwise.errors import InvalidRequest
from turnwise.types import Json

USER: Json = {"role": "user", "content": "Look."}


def used(call_id: str, name: str = "look", **others: Any) -> list[Json]:
    call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"at":1}'}}
    result = {"role": "tool", "tool_call_id": call_id, "content": f"result of {call_id}"}
    return [{"role": "assistant", "content": None, "tool_calls": [call], **others}, result]


def results(messages: list[Json]) -> list[str]:
    return [message["content"] for message in messages if message["role"] == "tool"]


def arguments(messages: list[Json]) -> list[str]:
    return [call["function"]["arguments"] for each in messages for call in each.get("tool_calls") or ()]


def edit(**fields: Any) -> Any:
    (found,) = read_edits({"edits": [fields]})
    return found


def test_anthropic_s_defaults_are_those_of_its_documentation():
    assert edit(type="clear_tool_uses_20250919") == ClearToolUses(("input_tokens", 100_000), 0, 3)
    assert edit(type="clear_thinking_20251015") == ClearThinking(num_kept=1)
    assert edit(type="compact_20260112", instructions="  ") == Compact(150_000, pauses=False, prompt=PROMPT)
    assert edit(type="compact_20260112", instructions="In short.").prompt == "In short."
    assert read_thresholds([{"type": "compaction"}]) == (Compact(None),)
    assert read_edits({}) == read_edits(None) == read_thresholds(None) == ()


def test_excluded_tools_keep_their_results_and_only_named_inputs_are_emptied():
    messages = [USER, *used("a"), *used("b", "write"), *used("c", "read"), *used("d")]
    keep = {"type": "tool_uses", "value": 1}
    left, num = edit(type="clear_tool_uses_20250919", keep=keep, exclude_tools=["write"]).cleared(messages)
    assert num == 2
    assert [text.startswith("result of") for text in results(left)] == [False, True, False, True]
    assert arguments(left) == arguments(messages)
    left, _ = edit(type="clear_tool_uses_20250919", keep=keep, clear_tool_inputs=["read"]).cleared(messages)
    assert arguments(left) == ['{"at":1}', '{"at":1}', "{}", '{"at":1}']
    assert results(messages) == ["result of a", "result of b", "result of c", "result of d"]
    assert edit(type="clear_tool_uses_20250919", keep={"type": "tool_uses", "value": 9}).cleared(messages)[1] == 0


def test_thinking_is_kept_since_so_many_of_the_user_s_newest_messages():
    """The replies of one loop of tools are one turn: a result is no message of the user."""
    loop = [*used("a", reasoning="first"), {"role": "assistant", "content": "Done.", "reasoning": "second"}]
    messages = [USER, *loop, USER, *used("b", reasoning="third"), USER]
    left, num = edit(type="clear_thinking_20251015").cleared(messages)
    assert num == 2
    assert [message.get("reasoning") for message in left if message["role"] == "assistant"] == [None, None, "third"]
    two = {"type": "thinking_turns", "value": 2}
    assert edit(type="clear_thinking_20251015", keep=two).cleared(messages) == (messages, 0)
    for everything in ("all", {"type": "all"}):
        assert edit(type="clear_thinking_20251015", keep=everything).older(messages) == frozenset()


@pytest.mark.parametrize("last", [USER, {**USER, "content": [{"type": "text", "text": "a"}]}, *used("a")])
def test_a_prompt_is_put_behind_a_conversation_and_taken_back(last):
    asked = with_prompt([USER, {"role": "assistant", "content": "Yes."}, last], PROMPT)
    assert not any(one["role"] == two["role"] == "user" for one, two in itertools.pairwise(asked))
    assert without_prompt(asked, PROMPT)[2] == last
    assert without_prompt(with_prompt([], PROMPT), PROMPT) == []


def test_our_prompt_asks_for_a_summary_and_what_stands_for_one_does_not():
    """Roles of calls are found by these words, also of harnesses that send the prompt by themselves."""
    assert COMPACTION.pattern.search(PROMPT) is not None
    assert COMPACTION.pattern.search(framed("It is under the mat.")["content"]) is None
    quoting = "The user wants the tool to summarize the conversation."
    assert read_root([framed(quoting)], None, {})[0] == "asks_for_summary"
    item = {"type": "compaction", "encrypted_content": seal(summary=quoting)}
    block = {"type": "compaction", "content": quoting}
    for later, task in (("Go on.", None), ("Summarize our conversation.", "asks_for_summary")):
        said = {"role": "user", "content": later}
        own = [{"role": "assistant", "content": [block]}, said]
        for call in (
            ManagedResponses().parse({"input": [item] if task is None else [item, said]}),
            ManagedMessages().parse({"max_tokens": 9, "messages": own}),
        ):
            assert read_root(call.messages, None, call.sampling)[0] == task


def test_what_stands_before_the_last_summary_is_left_out():
    system, user = ({"role": role, "content": role} for role in ("system", "user"))
    reply = {"role": "assistant", "content": "Yes."}
    for whole, kept in ((False, [system, user]), (True, [system])):
        old = {"type": "compaction", "encrypted_content": seal(summary="old", whole=False)}
        item = {"type": "compaction", "encrypted_content": seal(summary="new", whole=whole, session="s")}
        assert read_items([system, user, reply, old, reply, item, user]) == ([*kept, framed("new"), user], False, "s")
    block = {"type": "compaction", "content": "new", "encrypted_content": seal(session="s")}
    failed = {"type": "compaction", "content": None}
    text = {"type": "text", "text": "Done."}
    given = [system, user, {"role": "assistant", "content": [block, text]}, user]
    assert read_messages(given) == ([system, framed("new"), {"role": "assistant", "content": [text]}, user], "s")
    assert read_messages([user, {"role": "assistant", "content": [failed, text]}])[1] is None
    assert read_messages([user, {"role": "assistant", "content": [failed, text]}])[0][0] == user


def test_a_call_that_asks_for_a_summary_leaves_out_what_would_shape_another_reply():
    schema = {"format": {"type": "json_schema", "name": "a", "schema": {}}}
    tool = {"type": "function", "name": "look", "parameters": {}}
    body = {"input": [USER, {"type": "compaction_trigger"}], "text": schema, "tools": [tool], "tool_choice": "required"}
    call = ManagedResponses().parse(body)
    assert "response_format" not in call.body
    assert (call.body["tool_choice"], call.notes["known_task"]) == ("none", "asks_for_summary")
    prefilled = [USER, {"role": "assistant", "content": "The key"}]
    said = {"max_tokens": 9, "messages": prefilled, "stop_sequences": ["."], "compaction": {"type": "summarize"}}
    own = ManagedMessages().parse(said)
    assert own.body.keys() & {"stop", "continue_final_message", "add_generation_prompt"} == set()
    assert own.messages[-1]["content"] == PROMPT


@pytest.mark.parametrize("text", ["", "gAAA", "turnwise-1-", "turnwise-1-%", "turnwise-1-bnVsbA==", None, 5])
def test_a_text_that_was_not_sealed_here_is_not_read(text):
    assert unseal(text) is None
    with pytest.raises(InvalidRequest, match="is not this proxy's"):
        read_items([{"type": "compaction", "encrypted_content": text}])
