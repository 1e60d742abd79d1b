"""What makes two conversations the same, whatever way a client spells them."""

from __future__ import annotations

import pytest

from proxy.continuation.digests import canonical_arguments, context_digest, digest_history, has_media, message_digest

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
    ],
)
def test_spelling_does_not_count(one, other):
    """Ids, spacing, key order, null, parts and dropped thinking are forgotten."""
    assert message_digest(one) == message_digest(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (assistant(content="Hi."), assistant(content="Hi. ")),
        (assistant(content="Hi."), {"role": "user", "content": "Hi."}),
        (
            assistant(tool_calls=[CALL]),
            assistant(tool_calls=[{**CALL, "function": {"name": "look_up", "arguments": "{}"}}]),
        ),
        (assistant(tool_calls=[CALL]), assistant(tool_calls=[CALL, CALL])),
        (assistant(content="Hi."), assistant(content="Hi.", name="ada")),
        (
            assistant(tool_calls=[{"function": {"name": "f", "arguments": "not json"}}]),
            assistant(tool_calls=[{"function": {"name": "f", "arguments": "not json!"}}]),
        ),
    ],
)
def test_meaning_counts(one, other):
    """Text, role, arguments, number of calls and names are kept, unparsable arguments as they are."""
    assert message_digest(one) != message_digest(other)


def test_a_role_that_is_no_text_is_digested_like_any_other():
    """The engine refuses it; the proxy must not fail before."""
    history = digest_history([{"role": ["user"], "content": "Hello."}], b"")
    assert history.dialogue == history.messages


def test_each_prefix_has_its_digest_and_the_reply_extends_the_last():
    """The digest of a turn is what the next request's digest is at that place."""
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    reply = assistant(content="A")
    before = digest_history(messages, b"")
    after = digest_history([*messages, reply, {"role": "user", "content": "V"}], b"")
    assert before.full == after.full[:2]
    assert before.extended(reply) == (after.full[2], after.messages[2], after.dialogue[2])


def test_tools_change_the_full_digest_alone_and_system_messages_spare_the_dialogue():
    """Three digests tell three kinds of change apart."""
    tools = context_digest([{"type": "function", "function": {"name": "f"}}], {})
    user = {"role": "user", "content": "U"}
    bare = digest_history([user], b"")
    with_tools = digest_history([user], tools)
    with_system = digest_history([{"role": "system", "content": "S"}, user], b"")
    assert with_tools.full != bare.full
    assert with_tools.messages == bare.messages
    assert with_system.messages[-1] != bare.messages[-1]
    assert with_system.dialogue[-1] == bare.dialogue[-1]
    assert context_digest(None, {}) == b""
    assert context_digest(None, {"enable_thinking": False}) != b""


def test_media_is_anything_that_is_not_text():
    """Images, audio and unknown parts are the engine's to render."""
    assert has_media([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    assert has_media([{"role": "user", "content": [{"type": "hologram"}]}])
    assert has_media([{"role": "user", "content": [{"type": ["text"]}]}])
    assert not has_media(
        [{"role": "user", "content": [{"type": "text", "text": "x"}]}, {"role": "user", "content": "y"}]
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [("", {}), (None, {}), ("  ", {}), ('{"a": 1}', {"a": 1}), ("not JSON", "not JSON")],
)
def test_tool_arguments_are_compared_as_values_however_they_are_spelt(one, other):
    """What a model failed to write as JSON stays the text that it is."""
    assert canonical_arguments(one) == canonical_arguments(other)


@pytest.mark.parametrize("call", ["look_up", {"id": "a"}, {"id": "a", "function": "look_up"}])
def test_a_tool_call_of_an_unknown_shape_counts_as_it_is(call):
    """The engine refuses it; a digest must be had all the same."""
    same, other = assistant(tool_calls=[call]), assistant(tool_calls=[{"id": "b"}])
    assert message_digest(same) == message_digest(assistant(tool_calls=[call]))
    assert message_digest(same) != message_digest(other)
