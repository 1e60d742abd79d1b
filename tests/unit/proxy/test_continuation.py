"""Which turn a request extends, and the reason that is recorded when it extends none."""

import asyncio
import threading

import numpy as np
import pytest
from support.conversations import conversation_of
from support.waiting import WAIT_SECONDS

from proxy.dialects.chat import ChatCompletions
from proxy.sessions.conversation import tool_call_ids
from proxy.sessions.forest import KnownTurn, TurnForest, encode_ids
from proxy.sessions.memory import LiveSession
from proxy.sessions.place import CallPlace, extend
from proxy.sessions.rendering import RenderThreads
from proxy.sessions.template import ChatTemplate, Continued, Unsafe, restored
from turnwise.types import Json, Session

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "U"}
NEXT = {"role": "user", "content": "V"}
TOOLS = [{"type": "function", "function": {"name": "f"}}]


def call(messages: list[Json], **fields: object):
    return ChatCompletions().parse({"messages": messages, **fields})


def stored(
    forest: TurnForest,
    turn_id: str,
    messages: list[Json],
    reply: str | Json,
    *,
    parent: str | None = None,
    **fields: object,
):
    reasoning = str(fields.pop("reasoning", ""))
    history = conversation_of(call(messages, **fields))
    message = said(reply) if isinstance(reply, str) else reply
    full, plain, dialogue = history.extended(message)
    turn = KnownTurn(
        turn_id=turn_id,
        parent_turn_id=parent,
        chain_id=parent or turn_id,
        num_messages=len(messages) + 1,
        history_digest=full,
        messages_digest=plain,
        dialogue_digest=dialogue,
        prompt_digest=history.messages[-1],
        reasoning=reasoning,
        call_ids=tuple(tool_call_ids(message)),
        tokens=encode_ids(np.arange(3, dtype=np.int32)),
    )
    forest.add(turn)
    return turn


def said(text: str) -> Json:
    return {"role": "assistant", "content": text}


def test_of_equal_turns_a_request_extends_that_of_its_calls_then_a_whole_reply_then_the_newest():
    forest = TurnForest()

    def calling(call_id: str) -> Json:
        function = {"name": "f", "arguments": "{}"}
        return {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "function": function}]}

    def repeating(call_id: str) -> KnownTurn | None:
        result = {"role": "tool", "tool_call_id": call_id, "content": "R"}
        messages = [USER, calling(call_id), result]
        return forest.deepest(conversation_of(call(messages)), messages)

    first, second, cut_off = (stored(forest, f"t{name}", [USER], calling(name)) for name in "123")
    cut_off.is_aborted = True
    assert (repeating("1"), repeating("2"), repeating("3")) == (first, second, cut_off)
    assert repeating("of another run") is second


@pytest.mark.parametrize(
    ("messages", "fields", "reason"),
    [
        ([USER], {}, None),
        ([USER, said("edited"), NEXT], {}, "edited_history"),
        ([{**SYSTEM, "content": "T"}, USER, said("A"), NEXT], {}, "system_changed"),
        ([SYSTEM, USER, said("A"), NEXT], {"tools": TOOLS}, "tools_changed"),
        ([SYSTEM, USER, said("A"), NEXT], {"chat_template_kwargs": {"enable_thinking": False}}, "tools_changed"),
    ],
)
def test_a_history_that_extends_no_turn_has_a_reason(messages, fields, reason):
    forest = TurnForest()
    stored(forest, "t1", [SYSTEM, USER], "A")
    conversation = conversation_of(call(messages, **fields))
    assert forest.deepest(conversation, messages) is None
    assert forest.break_reason(conversation) == reason


S2 = {"role": "system", "content": "Now hurry."}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, said("A"), S2, NEXT, said("B"), USER], None),
        ([USER, said("A"), S2, NEXT, said("edited"), USER], "edited_history"),
        ([USER, said("A"), {**S2, "content": "Take your time."}, NEXT, said("B"), USER], "system_changed"),
        ([USER, said("A"), S2, NEXT, USER], "edited_history"),
        ([USER, said("A"), S2, NEXT], None),
        ([USER, said("A"), NEXT], None),
    ],
    ids=["grows", "edits the reply", "changes the system message", "drops the reply", "asks again", "branches"],
)
async def test_a_branch_that_drops_a_later_reply_has_a_reason(messages, reason):
    """It still extends stored tokens, so it is exact; a new sample or a branch of the same prompt drops nothing."""
    forest = TurnForest()
    first = stored(forest, "t1", [USER], "A")
    stored(forest, "t2", [USER, said("A"), S2, NEXT], "B", parent="t1")
    wanted = call(messages)
    conversation = conversation_of(wanted)
    parent = forest.deepest(conversation, messages)
    plan = await extended(forest, parent, Canned(), messages)
    assert plan.reason == reason
    assert plan.parent is (forest.by_id["t2"] if messages[-2:-1] == [said("B")] and reason is None else first)


def test_a_prompt_that_leaves_out_its_first_reply_has_a_reason():
    """No sampled token was tokenised again: it is the root of a chain, with a reason."""
    forest = TurnForest()
    stored(forest, "t1", [USER], "A")
    assert forest.break_reason(conversation_of(call([USER, NEXT]))) == "edited_history"
    assert forest.break_reason(conversation_of(call([USER]))) is None
    assert forest.break_reason(conversation_of(call([NEXT, USER]))) is None


def test_a_first_call_with_a_foreign_history_has_no_break_reason():
    """A session may start with a longer conversation: nothing of it was sampled here."""
    assert TurnForest().break_reason(conversation_of(call([USER, said("A"), NEXT]))) is None


class Canned:
    is_local = True

    def __init__(self, refuses: Unsafe | None = None) -> None:
        self.refuses = refuses
        self.seen: list[Continued] = []

    def num_rendered(self, _, conversation):
        return conversation.num_bytes

    def next_ids(self, continued, kinds, thinking):
        self.seen.append(continued._replace(messages=restored(continued.messages, thinking)))
        if self.refuses:
            raise self.refuses
        return np.array([8, 9], np.int32)


async def extended(
    forest: TurnForest, parent: KnownTurn, template: Canned | None, messages: list[Json], **fields: object
) -> CallPlace:
    wanted = call(messages, **fields)
    live = LiveSession(Session(session_id="s"), forest)
    place = CallPlace(live, live.session, forest, conversation_of(wanted))
    await extend(place, wanted, parent, parent.tokens, template, RenderThreads(), keep_thinking=False)
    return place


async def planned(template: Canned | None, messages: list[Json], **fields: object) -> CallPlace:
    forest = TurnForest()
    return await extended(forest, stored(forest, "t1", [USER], "A", reasoning="hm"), template, messages, **fields)


async def test_the_prompt_is_the_stored_tokens_followed_by_the_templates_tokens():
    """[0, 1, 2] stored, [8, 9] added: the prompt is [0, 1, 2, 8, 9], and the turn stores [8, 9]."""
    template = Canned()
    plan = await planned(template, [USER, said("A"), NEXT])
    assert plan.prompt.decoded().tolist() == [0, 1, 2, 8, 9]
    assert plan.between.tolist() == [8, 9]
    assert plan.reason is None
    assert plan.parent.num_messages == len([USER, said("A")])
    (continued,) = template.seen
    assert continued.messages[1]["reasoning"] == "hm"
    assert (continued.replied, continued.last_token, continued.reasoning) == (1, 2, "hm")


class Waiting(Canned):
    def __init__(self) -> None:
        super().__init__()
        self.loop_ran = threading.Event()

    def next_ids(self, *args, **options):
        assert self.loop_ran.wait(WAIT_SECONDS)
        return super().next_ids(*args, **options)


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "long " * 10_000},
        {"role": "user", "content": [{"type": "text", "text": "long " * 10_000}]},
        {"role": "tool", "content": ["long"] * 10_000},
    ],
)
async def test_the_event_loop_runs_while_a_long_message_is_tokenised(message):
    """A tool result of 20,000 characters takes 8 ms."""
    template = Waiting()
    asyncio.get_running_loop().call_soon(template.loop_ran.set)
    plan = await planned(template, [USER, said("A"), message])
    assert plan.prompt.decoded().tolist() == [0, 1, 2, 8, 9]


async def test_many_long_messages_leave_the_threads_that_read_the_store_free():
    """The common threads are few: as many texts of many megabytes would stop all calls that read the store."""
    template = Waiting()
    long = {"role": "user", "content": "long " * 10_000}
    plans = [asyncio.ensure_future(planned(template, [USER, said("A"), long])) for _ in range(40)]
    await asyncio.sleep(0)
    await asyncio.wait_for(asyncio.to_thread(template.loop_ran.set), WAIT_SECONDS)
    assert {len(plan.between) for plan in await asyncio.gather(*plans)} == {2}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"continue_final_message": True}, "prefill"),
        ({"echo": True}, "prefill"),
        ({"add_generation_prompt": False}, "prefill"),
        ({"truncate_prompt_tokens": 10}, "truncated_prompt"),
    ],
)
async def test_a_call_that_the_engine_must_render_starts_a_chain(fields, reason):
    plan = await planned(Canned(), [USER, said("A"), NEXT], **fields)
    assert (plan.parent, plan.prompt, plan.reason) == (None, None, reason)


async def test_media_an_unknown_template_and_a_refusal_start_a_chain_with_their_reason():
    forest = TurnForest()
    parent, sounding = stored(forest, "t1", [USER], "A"), call([USER, said("A"), NEXT])
    sounding.has_other_media = True
    live = LiveSession(Session(session_id="s"), forest)
    place = CallPlace(live, live.session, forest, conversation_of(sounding))
    await extend(place, sounding, parent, parent.tokens, Canned(), RenderThreads(), keep_thinking=False)
    assert place.reason == "media"
    assert (await planned(None, [USER, said("A"), NEXT])).reason == "template_unknown"
    assert (await planned(Canned(Unsafe("thinking_stripped")), [USER, said("A"), NEXT])).reason == "thinking_stripped"


async def test_thinking_is_restored_in_every_reply_that_had_some():
    """Also in ancestors, each at its own position; a reply without thinking stays unchanged."""
    forest, template = TurnForest(), Canned()
    stored(forest, "t1", [USER], "A", reasoning="one")
    parent = stored(forest, "t2", [USER, said("A"), NEXT], "B", parent="t1", reasoning="two")
    messages = [USER, said("A"), NEXT, said("B"), USER]
    await extended(forest, parent, template, messages)
    (continued,) = template.seen
    assert [message.get("reasoning") for message in continued.messages] == [None, "one", None, "two", None]
    assert "reasoning" not in messages[1]


class Characters:
    """A tokenizer that finds no special token in a text: each character is a token, and the end of a turn is five."""

    chat_template = ""
    all_special_tokens: list[str] = []  # noqa: RUF012  as the protocol has it

    def apply_chat_template(self, conversation: list[Json], *, add_generation_prompt: bool, **_: object) -> str:
        said_so_far = "".join(f"<{message['role']}>{message['content']}<end>" for message in conversation)
        return said_so_far + ("<assistant>" if add_generation_prompt else "")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(map(ord, text))

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join("<end>" if token == END else chr(token) for token in token_ids)


END = 1000
"""What the engine samples at the end of a turn."""


def test_a_tokenizer_that_splits_the_end_of_a_turn_extends_only_a_reply_without_one():
    template = ChatTemplate(Characters(), [END], "string")
    messages = [USER, said("A"), NEXT]
    cut_at_a_length = Continued(
        messages=messages, replied=1, last_token=ord("A"), reasoning="", tools=None, arguments={}, keep_thinking=False
    )
    between = template.next_ids(cut_at_a_length)
    assert "".join(map(chr, between)) == "<end><user>V<end><assistant>"
    with pytest.raises(Unsafe) as refused:
        template.next_ids(cut_at_a_length._replace(last_token=END))
    assert refused.value.reason == "tokenizer_differs"
