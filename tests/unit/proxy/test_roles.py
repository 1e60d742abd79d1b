"""The role of a chain: detected when it starts, corrected by later turns."""

import json
from typing import Any

import pytest
from support.conversations import conversation_of

from proxy.dialects.base import Call
from proxy.dialects.chat import ChatCompletions
from proxy.features.roles.chains import About, argument_digests, corrections, find_role, read_root, reply_digest
from proxy.sessions.forest import KnownTurn, TurnForest
from turnwise.types import Json, Role

CODER: Json = {"role": "system", "content": "You write code."}
TITLES: Json = {"role": "system", "content": "You are a title generator. You output ONLY a thread title."}
USER: Json = {"role": "user", "content": "Fix the bug."}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def call_of(*messages: Json, agent_id: str | None = None, **fields: Any) -> Call:
    call = ChatCompletions().parse({"messages": list(messages), **fields})
    call.agent_id = agent_id
    return call


def role_of(
    call: Call,
    forest: TurnForest,
    parent: KnownTurn | None = None,
    reason: str | None = None,
    *,
    is_named: bool = True,
) -> tuple[Role, str]:
    root = read_root(call.messages, call.tools, call.body)
    return find_role(call, parent, reason, forest, root, is_named=is_named)


def stored(
    forest: TurnForest,
    turn_id: str,
    call: Call,
    parent: KnownTurn | None = None,
    *,
    at: float = 0.0,
    aborted: bool = False,
    is_empty: bool = False,
    arguments: frozenset[bytes] = frozenset(),
    reply: Json | None = None,
) -> KnownTurn:
    (role, _), (side_task, system_digest) = (
        role_of(call, forest, parent),
        read_root(call.messages, call.tools, call.body),
    )
    turn = KnownTurn(
        turn_id=turn_id,
        parent_turn_id=None if parent is None else parent.turn_id,
        chain_id=turn_id if parent is None else parent.chain_id,
        num_messages=len(call.messages) + 1,
        history_digest=turn_id.encode(),
        messages_digest=b"",
        dialogue_digest=b"",
        prompt_digest=conversation_of(call).messages[-1],
        is_aborted=aborted,
        about=About(
            role=role,
            is_empty=is_empty,
            side_task=side_task if parent is None else None,
            system_digest=system_digest,
            started_at=at,
            ended_at=at + 1,
            arguments=arguments,
            reply_digest=reply_digest(reply or {}),
        ),
    )
    forest.add(turn)
    return turn


def shown(
    forest: TurnForest, turn_id: str, call: Call, parent: KnownTurn | None = None, *, at: float = 0.0
) -> list[tuple[list[str], tuple[Role, str]]]:
    return corrections(stored(forest, turn_id, call, parent, at=at), forest, conversation_of(call))


@pytest.mark.parametrize(
    ("call", "reason", "found"),
    [
        (call_of(CODER, USER, USER, tools=TOOLS), None, (Role.MAIN, "same_system")),
        (call_of(CODER, USER, agent_id="a1"), None, (Role.SUB_AGENT, "agent_id")),
        (call_of({**CODER, "content": "You search."}, USER), None, (Role.SUB_AGENT, "other_system")),
        (
            call_of({**CODER, "content": "You search."}, USER),
            "system_changed",
            (Role.MAIN, "continues_conversation"),
        ),
        (call_of(TITLES, USER), None, (Role.SIDE, "asks_for_title")),
        (call_of(TITLES, USER, tools=TOOLS), None, (Role.SUB_AGENT, "other_system")),
        (call_of({"role": "user", "content": "quota"}, max_tokens=1), None, (Role.SIDE, "probe")),
        (
            call_of({"role": "user", "content": "Summarize this coding conversation in under 50 characters."}),
            None,
            (Role.SIDE, "asks_for_title"),
        ),
        (
            call_of({"role": "user", "content": "Summarize this coding conversation."}),
            None,
            (Role.SUMMARY, "asks_for_summary"),
        ),
    ],
)
def test_a_new_chain_has_its_role_from_ids_system_tools_and_shape(call, reason, found):
    forest = TurnForest()
    stored(forest, "main", call_of(CODER, USER, tools=TOOLS))
    assert role_of(call, forest, reason=reason) == found


def test_a_sessions_only_chain_is_the_main_agents_whatever_it_asks_for():
    """A session that trains a model to write titles has no other chain."""
    assert role_of(call_of(TITLES, USER), TurnForest()) == (Role.MAIN, "first_chain")


def test_an_attempt_that_is_sampled_again_and_not_continued_is_a_retry():
    """It is marked once the other attempt is continued. Concurrent attempts are separate samples."""
    forest = TurnForest()
    first, second = (stored(forest, name, call_of(CODER, USER), at=at) for name, at in (("a", 0.0), ("b", 2.0)))
    assert corrections(second, forest, conversation_of(call_of(CODER, USER))) == []
    found = shown(forest, "d", call_of(CODER, USER, USER), second, at=4.0)
    assert [(turn_ids, role) for turn_ids, (role, _) in found] == [([first.turn_id], Role.RETRY)]
    parallel = TurnForest()
    _, second = (stored(parallel, name, call_of(CODER, USER), at=0.5) for name in ("a", "b"))
    assert shown(parallel, "d", call_of(CODER, USER, USER), second) == []


def test_a_later_chain_of_the_agent_is_none_of_its_first_attempt():
    """The first call was sampled again, so its turn is a retry; after a compaction the agent begins anew."""
    forest = TurnForest()
    first, second = (stored(forest, name, call_of(CODER, USER), at=at) for name, at in (("a", 0.0), ("b", 2.0)))
    shown(forest, "c", call_of(CODER, USER, USER), second, at=4.0)
    first.about.role = Role.RETRY
    assert role_of(call_of(CODER, {"role": "user", "content": "So far."}), forest) == (Role.MAIN, "same_system")


def test_an_attempt_that_was_cut_off_is_a_retry_once_its_prompt_is_sampled_again():
    forest = TurnForest()
    stored(forest, "a", call_of(CODER, USER), aborted=True)
    found = shown(forest, "b", call_of(CODER, USER), at=2.0)
    assert found == [(["a"], (Role.RETRY, "sampled_again"))]


@pytest.mark.parametrize("reminders", [(), ({"role": "user", "content": "You answered nothing."},)])
@pytest.mark.parametrize("is_asked_first", [False, True])
def test_an_empty_reply_that_the_next_call_leaves_out_is_a_retry(reminders, is_asked_first):
    """Its harness asks again with the same prompt (Qwen Code, Kimi Code) or a reminder (Claude Code, Hermes Agent)."""
    forest, asked, parent = TurnForest(), (CODER, USER), None
    if not is_asked_first:
        parent = stored(forest, "call", call_of(*asked))
        asked = (*asked, {"role": "assistant", "content": "I look."}, {"role": "user", "content": "Go on."})
    stored(forest, "empty", call_of(*asked), parent, at=2.0, is_empty=True)
    found = shown(forest, "again", call_of(*asked, *reminders), parent, at=4.0)
    assert found == [(["empty"], (Role.RETRY, "empty_reply"))]


def test_an_empty_reply_stays_the_agents_where_a_call_repeats_it_or_was_made_beside_it():
    """A harness that sends the empty reply back goes on from it; parallel agents ask with equal prompts."""
    forest, asked = TurnForest(), (CODER, USER)
    stored(forest, "empty", call_of(*asked), at=2.0, is_empty=True)
    assert (
        shown(forest, "tools", call_of(*asked, {"role": "assistant", "content": ""}, USER, tools=TOOLS), at=4.0) == []
    )
    assert shown(forest, "beside", call_of(*asked), at=2.5) == []


SUMMARIES = {
    "LangChain": "<role>\nContext Extraction Assistant\n</role>\n\n<primary_objective>\nExtract what matters.",
    "Semantic Kernel": "Provide a concise and complete summarization of the entire dialog that has 5 sentences",
    "MS Agent Framework": "**Generate a clear and complete summary of the entire conversation in five sentences.**",
    "Inspect AI": "You have been working on the task described above. Write a continuation summary that will allow you "
    "(or another instance of yourself) to resume work efficiently in a future context window",
    "Terminus 2": "You are about to hand off your work to another AI agent.\n  Please provide a summary",
    "Terminus 2, questions": "You are picking up work from a previous AI agent on this task:\n\n**Summary from",
    "OpenHands": "You are maintaining a context-aware state summary for an interactive agent.",
    "pi": "The messages above are a conversation to summarize. Create a structured checkpoint.",
    "Agno": "You are compressing tool call results to save context space while preserving critical information.",
    "gptme": "Context budget has been reached — produce a structured checkpoint before history is compacted.",
    "Copilot CLI": "Please create a detailed summary of the conversation so far. The history is being compacted so "
    "moving forward, all conversation history will be removed",
    "Cline": "Summarize the provided coding session into a concise continuation note with detailed next steps.",
    "AG2": "Summarize the following conversation history concisely, preserving key decisions, findings, and context:",
}


@pytest.mark.parametrize("role", ["user", "system"])
@pytest.mark.parametrize("harness", SUMMARIES)
def test_the_compaction_prompts_of_harnesses_ask_for_summaries_without_tools_and_parent(harness, role):
    """On their own, after the conversation, and as the next turn of the agent's chain."""
    forest = TurnForest()
    agent = stored(forest, "agent", call_of(CODER, USER, tools=TOOLS))
    asked = {"role": role, "content": SUMMARIES[harness]}
    for messages in ([asked], [CODER, USER, {"role": "assistant", "content": "Done."}, asked]):
        call = call_of(*messages)
        assert role_of(call, forest, reason="tools_changed") == (Role.SUMMARY, "asks_for_summary")
    call = call_of(CODER, USER, {"role": "assistant", "content": "Done."}, asked, tools=TOOLS)
    assert role_of(call, forest, agent) == (Role.SUMMARY, "compaction_prompt")


@pytest.mark.parametrize(
    "text",
    [
        "You are the component that summarizes a conversation when its context window is about to overflow.",
        "You are a specialized system component responsible for distilling chat history into a structured XML.",
    ],
)
def test_a_call_without_tools_whose_system_message_asks_for_a_summary_of_its_history_is_one(text):
    """Qwen Code and Gemini CLI replace the agent's system message; what a call with tools has there is the agent's."""
    forest, history = (
        TurnForest(),
        (USER, {"role": "assistant", "content": "I look at the tests before I change the code."}),
    )
    agent = stored(forest, "agent", call_of(CODER, USER, tools=TOOLS), reply=history[1])
    snapshot = {
        "role": "user",
        "content": "First, reason in your <analysis> block. Then, produce the <state_snapshot>.",
    }
    messages = ({"role": "system", "content": text}, *history, snapshot)
    call = call_of(*messages)
    assert role_of(call, forest, reason="system_changed") == (Role.SUMMARY, "asks_for_summary")
    call = call_of(*messages, tools=TOOLS)
    assert role_of(call, forest, reason="system_changed") == (agent.about.role, "continues_conversation")


@pytest.mark.parametrize("harness", SUMMARIES)
def test_a_harnesss_compaction_prompt_without_a_session_asks_for_a_summary_even_alone(harness):
    """A session that the call names may train a model to write summaries; so may an application's own prompt."""
    call = call_of({"role": "user", "content": SUMMARIES[harness]})
    assert role_of(call, TurnForest(), is_named=False) == (Role.SUMMARY, "asks_for_summary")
    assert role_of(call, TurnForest()) == (Role.MAIN, "first_chain")
    own = call_of({"role": "user", "content": "Summarize this conversation with a customer."})
    assert role_of(own, TurnForest(), is_named=False) == (Role.MAIN, "first_chain")


@pytest.mark.parametrize(
    "asked",
    [TITLES, {"role": "user", "content": "Your task: Create a 2-4 word title for this conversation.\n\nRules:"}],
    ids=["opencode", "gptme"],
)
def test_a_harnesss_prompt_for_a_title_without_a_session_is_a_side_call_even_alone(asked):
    call = call_of(asked, USER) if asked is TITLES else call_of(asked)
    assert role_of(call, TurnForest(), is_named=False) == (Role.SIDE, "asks_for_title")
    assert role_of(call, TurnForest()) == (Role.MAIN, "first_chain")
    own = call_of({"role": "user", "content": "Write a title for this article."})
    assert role_of(own, TurnForest(), is_named=False) == (Role.MAIN, "first_chain")


def test_an_agent_that_goes_on_under_another_system_message_keeps_its_role():
    """gptme writes into it what a summary replaced; the replies that it repeats were sampled in this session."""
    forest, changed = TurnForest(), {"role": "system", "content": "You write code. Resumed from a checkpoint."}
    sampled = {"role": "assistant", "content": "I look at the tests before I change the code."}
    stored(forest, "agent", call_of(CODER, USER, tools=TOOLS), reply=sampled)
    on = call_of(changed, USER, sampled, USER, tools=TOOLS)
    assert role_of(on, forest, reason="edited_history") == (Role.MAIN, "continues_conversation")
    other = call_of(changed, USER, {**sampled, "content": "Another agent wrote this reply."}, USER, tools=TOOLS)
    assert role_of(other, forest, reason="edited_history") == (Role.SUB_AGENT, "other_system")


@pytest.mark.parametrize(
    "text",
    [
        "Summarise the file README.md.",
        "Hand the parcel off to the courier.",
        "Write a summary of the quarter's results.",
        "Summarize how session management works in this repository.",
        "Write a compact context manager for temporary files.",
        "Compress the session logs older than a week.",
    ],
)
def test_an_agents_own_work_is_no_compaction(text):
    forest = TurnForest()
    agent = stored(forest, "agent", call_of(CODER, USER, tools=TOOLS))
    call = call_of(
        CODER, USER, {"role": "assistant", "content": "Done."}, {"role": "user", "content": text}, tools=TOOLS
    )
    assert role_of(call, forest, agent) == (Role.MAIN, "extends")


@pytest.mark.parametrize("text", ["Find all callers of f.", "Find all callers of f. " * 400])
def test_a_sub_agent_with_the_agents_system_message_is_found_by_the_call_that_asks_it(text):
    """Until the call has its result; a question that no call asks is the agent's own."""
    forest, task = TurnForest(), {"role": "user", "content": text}
    call = {"id": "c", "function": {"name": "research", "arguments": json.dumps({"input": f"{text}\n"})}}
    asked = argument_digests({"role": "assistant", "tool_calls": [call]})
    agent = stored(forest, "agent", call_of(CODER, USER, tools=TOOLS), arguments=asked)
    sub_agent, other = call_of(CODER, task, tools=TOOLS), call_of(CODER, USER, tools=TOOLS)
    assert role_of(sub_agent, forest) == (Role.SUB_AGENT, "asked_by_tool_call")
    assert role_of(other, forest) == (Role.MAIN, "same_system")
    stored(forest, "next", call_of(CODER, USER, {"role": "assistant", "content": "a"}, tools=TOOLS), agent)
    assert role_of(sub_agent, forest) == (Role.MAIN, "same_system")


def test_a_turn_that_extends_an_attempt_that_was_sampled_again_disproves_the_mark():
    """Twins with one task: the second continues, the first is marked, then the first continues too."""
    forest, task = TurnForest(), call_of({"role": "system", "content": "You search."}, USER)
    stored(forest, "agent", call_of(CODER, USER, tools=TOOLS))
    twins = [stored(forest, name, task, at=at) for name, at in (("first", 0.0), ("second", 2.0))]
    replied = call_of({"role": "system", "content": "You search."}, USER, {"role": "assistant", "content": "a"}, USER)
    (marked,) = shown(forest, "second-next", replied, twins[1], at=4.0)
    assert (marked[0], marked[1][0]) == (["first"], Role.RETRY)
    twins[0].about.role = Role.RETRY
    assert role_of(replied, forest, twins[0]) == (Role.SUB_AGENT, "extends")
    (restored,) = shown(forest, "first-next", replied, twins[0], at=6.0)
    assert restored == (["first"], (Role.SUB_AGENT, "continued"))
