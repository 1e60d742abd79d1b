"""When two conversations count as equal, in whatever form a client writes them."""

import pytest

from proxy.sessions.conversation import (
    CALL_IDS,
    CALL_TEXT,
    NAME,
    canonical_arguments,
    has_media,
    message_digest,
)
from turnwise.tokenizer import shape_conversation

CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"name": "Kim", "n": 1}'}}


def assistant(**fields: object) -> dict:
    return {"role": "assistant", "content": None, **fields}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (assistant(content=""), assistant()),
        (assistant(content="Hi."), assistant(content=[{"type": "text", "text": "Hi."}])),
        (assistant(content="a\nb"), assistant(content=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])),
        (assistant(tool_calls=[CALL]), assistant(tool_calls=[{**CALL, "id": "another"}], content="")),
        (
            assistant(tool_calls=[CALL]),
            assistant(tool_calls=[{**CALL, "function": {"name": "look_up", "arguments": '{"n":1,"name":"Kim"}'}}]),
        ),
        (assistant(content="Hi.", reasoning="Hm."), assistant(content="Hi.", refusal=None, annotations=[])),
        (
            {"role": "tool", "tool_call_id": "a", "content": "42"},
            {"role": "tool", "tool_call_id": "b", "content": "42"},
        ),
        (assistant(content="\n\n", tool_calls=[CALL]), assistant(tool_calls=[CALL])),
        (assistant(content="Hi."), assistant(content="Hi.", name="ada")),
        (
            {"role": "user", "content": [{"type": "text", "text": "Hi.", "cache_control": {"type": "ephemeral"}}]},
            {"role": "user", "content": "Hi."},
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {}, "cache_control": {}}]},
            {"role": "user", "content": [{"type": "image_url", "image_url": {}}]},
        ),
    ],
)
def test_fields_that_no_template_reads_are_ignored(one, other):
    assert message_digest(one) == message_digest(other)


@pytest.mark.parametrize(
    ("field", "one", "other"),
    [
        (NAME, {"role": "user", "content": "Hi.", "name": "ada"}, {"role": "user", "content": "Hi."}),
        (CALL_IDS, assistant(tool_calls=[CALL]), assistant(tool_calls=[{**CALL, "id": "another"}])),
        (
            CALL_IDS,
            {"role": "tool", "tool_call_id": "a", "content": "42"},
            {"role": "tool", "tool_call_id": "b", "content": "42"},
        ),
    ],
)
def test_names_and_ids_count_where_the_template_prints_them(field, one, other):
    assert message_digest(one) == message_digest(other)
    assert message_digest(one, frozenset({field})) != message_digest(other, frozenset({field}))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (assistant(content="Hi."), assistant(content="H i.")),
        ({"role": "user", "content": "Hi."}, {"role": "user", "content": "Hi. "}),
        (assistant(content="Hi."), {"role": "user", "content": "Hi."}),
        (
            assistant(tool_calls=[CALL]),
            assistant(tool_calls=[{**CALL, "function": {"name": "look_up", "arguments": "{}"}}]),
        ),
        (assistant(tool_calls=[CALL]), assistant(tool_calls=[CALL, CALL])),
    ],
)
def test_fields_that_templates_read_change_the_digest(one, other):
    assert message_digest(one) != message_digest(other)


def test_media_is_anything_that_is_not_text():
    assert has_media([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert has_media([{"role": "user", "content": [{"type": "hologram"}]}])
    assert has_media([{"role": "user", "content": [{"type": ["text"]}]}])
    assert not has_media(
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": "y"}]
    )


@pytest.mark.parametrize(
    "part",
    [
        *("So.", {"type": "text", "text": "So."}, {"type": "input_text", "text": "So."}, {"text": "So."}),
        *({"type": "output_text", "text": "So."}, {"type": "refusal", "refusal": "So."}),
        {"type": "thinking", "thinking": "So."},
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_part_of_each_type_that_vllm_reads_as_text_is_text(role, part):
    """Its turn is trained and extends the turn whose reply was this text; the template gets the text."""
    one, other = ({"role": role, "content": content} for content in ([part, "Go."], "So.\nGo."))
    assert message_digest(one) == message_digest(other)
    assert has_media([one]) == (part == {"text": "So."})  # which may be an image by its URL
    shaped = shape_conversation([one], "string", has_developer=True)
    assert shaped == [{"role": role, "content": "So.\nGo."}]


@pytest.mark.parametrize(
    ("one", "other"),
    [("", {}), (None, {}), ("  ", {}), ('{"a": 1}', {"a": 1}), ("not JSON", "not JSON")],
)
def test_tool_arguments_are_compared_as_values(one, other):
    """Arguments that are not valid JSON are compared as text."""
    assert canonical_arguments(one) == canonical_arguments(other)


@pytest.mark.parametrize("calls", [{}, {"tool_calls": [CALL]}])
def test_white_space_around_a_reply_does_not_count(calls):
    """Agents strip what was sampled before a tool call: templates and parsers leave line breaks there."""
    assert message_digest(assistant(content="I look.\n\n", **calls)) == message_digest(
        assistant(content="I look.", **calls)
    )


def test_text_beside_calls_is_ignored_only_with_their_ids_and_only_if_asked_for():
    fields, said = frozenset({CALL_TEXT}), assistant(content="I look.", tool_calls=[CALL])
    other = {**CALL, "id": "other"}
    assert message_digest(said, fields) == message_digest(assistant(content=None, tool_calls=[CALL]), fields)
    assert message_digest(said, fields) != message_digest(assistant(content=None, tool_calls=[other]), fields)
    assert message_digest(said) != message_digest(assistant(content=None, tool_calls=[CALL]))
    bare = {field: value for field, value in CALL.items() if field != "id"}
    one, another = (assistant(content=text, tool_calls=[bare]) for text in ("I look.", ""))
    assert message_digest(one, fields) != message_digest(another, fields)
