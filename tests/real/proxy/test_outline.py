"""A long conversation is rendered in short, with the same answer as the whole one."""

import copy
import functools
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from unit.proxy.test_templates_of_many_families import FAMILIES, TOOLS, USER, small_tokenizer, template_of

from proxy.features.outline.outlines import Outliner, shorten_if_alike
from proxy.sessions.template import ChatTemplate, Continued, Unsafe

LONG = "A text that is much longer than what is kept of it. " * 20
TEXTS = st.sampled_from(
    ["", " ", "Yes.", "Žofie — 誰?", LONG, LONG + "</think>" + LONG, "<tool_response>\nx\n</tool_response>"]
)
NAMES = st.sampled_from(["look_up", "f.build", "send_off"])
THINKING = st.sampled_from([None, None, "I recall.", LONG])

NAMED_RESULTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.role == 'tool' %}{% set found = namespace(name='') %}"
    "{% for n in messages[: loop.index0] %}{% for c in n.tool_calls or [] if CONDITION %}"
    "{% set found.name = c.function.name %}{% endfor %}{% endfor %}{{ found.name }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{{ c.id if PRINTS_ID }}{% endfor %}"
    "<|im_end|>{% endfor %}<|im_start|>"
)
"""Prints with each result the function of an earlier call with its id."""
LAST_CALL = NAMED_RESULTS.replace("CONDITION", "c.id == m.tool_call_id").replace("PRINTS_ID", "false")
FIRST_CALL = NAMED_RESULTS.replace("CONDITION", "c.id == m.tool_call_id and not found.name").replace(
    "PRINTS_ID", "false"
)


@pytest.mark.parametrize(
    "source", ["{% for m in messages %}<{{ loop.index }}>{{ m.content }}<|im_end|>{% endfor %}", FIRST_CALL]
)
def test_a_template_that_numbers_its_messages_or_reads_early_calls_is_rendered_whole(source):
    """The second one names a result by the first call with its id: of calls with the same id, not the reply's."""
    assert template_from(source).short is None


def work(number: int) -> list[dict]:
    function = {"name": f"f.do_{number}", "arguments": "{}"}
    return [
        {"role": "assistant", "content": "", "tool_calls": [{"id": f"c{number}", "function": function}]},
        {"role": "tool", "tool_call_id": f"c{number}", "content": "r"},
    ]


@pytest.mark.parametrize("num_calls", [5, 20])
@pytest.mark.parametrize("late", [[], [{"role": "tool", "tool_call_id": "c2", "content": "late"}]])
def test_a_late_result_of_an_earlier_call_keeps_its_function(num_calls, late):
    """After a result of the reply's own call or in its place, also where the kind of conversation is known."""
    template = template_from(LAST_CALL)
    assert template.short is not None
    end = min(template.end_tokens)
    messages = [USER, *(message for number in range(num_calls) for message in work(number))]
    replied = len(messages) - 2
    other = [*messages[:-1], {**messages[-1], "tool_call_id": "c2"}]
    for sent in (messages, [*messages, *late], other):
        continued = Continued(sent, replied, end, "", None, {}, keep_thinking=False)
        found = (template.short or template).next_ids(continued)
        assert found.tolist() == template.next_ids(continued).tolist()
        assert ("f.do_2" in template.text_of(list(found))) == (sent is other or sent[-1:] == late)


@pytest.mark.parametrize(
    "family", ["qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "glm4moe", "gptoss", "gemma3"]
)
def test_the_templates_of_widely_used_models_can_be_rendered_in_short(family):
    assert shortened(family).short is not None


@functools.cache
def template_from(source: str) -> ChatTemplate:
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = source
    template = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")], "string")
    shorten_if_alike(template)
    return template


def shortened(family: str) -> ChatTemplate:
    template = template_from(LAST_CALL) if family == "last call" else template_of(family)
    if template.short is None:
        shorten_if_alike(template)
    return template


@st.composite
def conversations(draw: st.DrawFn) -> tuple[list[dict], int]:
    """A conversation of several patterns, each repeated, with a reply somewhere in its second half."""
    messages: list[dict] = []
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(TEXTS)})
    messages.append({"role": "user", "content": draw(TEXTS)})
    for number in range(draw(st.integers(1, 4))):
        pattern = draw(patterns(number))
        messages += pattern * draw(st.sampled_from([1, 2, 15, 16, 31]))
    replies = [position for position, message in enumerate(messages) if message["role"] == "assistant"]
    return messages, draw(st.sampled_from(replies[len(replies) // 2 :]))


@st.composite
def patterns(draw: st.DrawFn, place: int) -> list[dict]:
    """An answer and a question, or calls and their results, perhaps with a late result or a question after them.

    `place` is the pattern's number. A late result answers a call of an earlier pattern.
    """
    reply = {"role": "assistant", "content": draw(TEXTS)}
    if thinking := draw(THINKING):
        reply["reasoning"] = thinking
    number = draw(st.integers(0, 3))
    if not number:
        return [reply, {"role": "user", "content": draw(TEXTS)}]
    arguments = json.dumps({"name": draw(TEXTS)})
    ids = [f"call_{draw(st.sampled_from([0, place]))}{each:03}" for each in range(number)]
    reply["tool_calls"] = [
        {"id": each, "type": "function", "function": {"name": draw(NAMES), "arguments": arguments}} for each in ids
    ]
    late = [f"call_{draw(st.integers(0, place))}000"] if draw(st.booleans()) else []
    results = [{"role": "tool", "tool_call_id": each, "content": draw(TEXTS)} for each in [*ids, *late]]
    return [reply, *results, *([{"role": "user", "content": draw(TEXTS)}] if draw(st.booleans()) else [])]


def answered(continuation, messages: list[dict], replied: int, ending: tuple[int, str], *, keep_thinking: bool):
    tools = TOOLS if any(message.get("tool_calls") for message in messages) else None
    try:
        found = continuation(Continued(messages, replied, *ending, tools, {}, keep_thinking))
    except Unsafe as unsafe:
        return unsafe.reason
    return found.tolist()


@pytest.mark.parametrize("family", [*FAMILIES, "last call"])
@settings(max_examples=settings.default.max_examples // 8, suppress_health_check=list(HealthCheck))
@given(conversation=conversations(), ended=st.booleans(), keep_thinking=st.booleans())
def test_rendering_in_short_and_in_full_gives_the_same_ids(family, conversation, ended, keep_thinking):
    """On random conversations with tools and thinking, for every template: the same ids, or the same refusal.

    Also where a client sends no thinking, and the kinds of the first half are known from an earlier call.
    """
    template, (messages, replied) = shortened(family), conversation
    ending = (min(template.end_tokens) if ended else 5), messages[replied].get("reasoning", "")
    whole = answered(template.next_ids, messages, replied, ending, keep_thinking=keep_thinking)
    if template.short is None:  # all is rendered whole
        return
    next_ids = template.short.next_ids
    assert answered(next_ids, messages, replied, ending, keep_thinking=keep_thinking) == whole
    sent = [{field: value for field, value in message.items() if field != "reasoning"} for message in messages]
    thinking = {at: message["reasoning"] for at, message in enumerate(messages) if "reasoning" in message}
    continuation, half = functools.partial(next_ids, kinds=[]), sent[: len(sent) // 2]
    if (first := next((at for at, message in enumerate(half) if message["role"] == "assistant"), None)) is not None:
        earlier = {at: text for at, text in thinking.items() if at < len(half)}
        answered(functools.partial(continuation, thinking=earlier), half, first, ending, keep_thinking=keep_thinking)
    continuation = functools.partial(continuation, thinking=thinking)
    assert answered(continuation, sent, replied, ending, keep_thinking=keep_thinking) == whole


def test_a_growing_conversation_is_shortened_as_if_nothing_of_it_was_known():
    """100 calls with results, then 40 questions with thinking, then calls again; the texts name their positions."""
    outliner, known, thinking = Outliner(("</think>",)), [], {}
    roles = ["system", "user", *["assistant", "tool"] * 100, *["assistant", "user"] * 40, *["assistant", "tool"] * 50]
    messages = [{"role": role, "content": f"{position} {LONG}"} for position, role in enumerate(roles)]
    for number in range(30, len(messages), 2):
        sent, replied = messages[:number], number - 2
        if replied in range(202, 282, 8):
            thinking[replied] = f"{replied} {LONG}"
        continued = Continued(sent, replied, 5, "", None, {}, keep_thinking=False)
        assert outliner.shortened(continued, known, thinking) == outliner.shortened(continued, [], thinking)
    assert len(known) == len(messages) - 2


def test_tools_are_rendered_whole_where_a_template_prints_them_after_a_reply():
    """Here before every question; Mistral's templates do so before the last one."""
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ tools | tojson }}{% endif %}"
        "<|im_start|>{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}<|im_start|>"
    )
    template = ChatTemplate(tokenizer, [tokenizer.convert_tokens_to_ids("<|im_end|>")], "string")
    shorten_if_alike(template)
    messages = [{"role": "user", "content": LONG}, {"role": "assistant", "content": "Yes."}] * 20
    messages.append({"role": "user", "content": LONG})
    tools = [{**TOOLS[0], "function": {**TOOLS[0]["function"], "name": name}} for name in ("a", "b", "c")]
    continued = Continued(messages, 39, min(template.end_tokens), "", tools, {}, keep_thinking=False)
    found = (template.short or template).next_ids(continued)
    assert template.short is not None
    assert found.tolist() == template.next_ids(continued).tolist()
