"""The session that a request names, by ids that harnesses send on their own."""

from typing import Any

import pytest

from proxy.dialects.base import Call
from proxy.dialects.chat import ChatCompletions
from proxy.features.native_ids import NATIVE_IDS
from proxy.sessions.identities import end_user, name_session
from turnwise.errors import InvalidRequest

UUID = "0195f4c2-7d1e-7a3b-9c55-1f2e3d4c5b6a"
THREAD = "0195f4c2-7d1e-7a3b-9c55-000000000000"


def named(
    headers: dict[str, str], body: dict[str, Any] | None = None, path: str | None = None, ignored: tuple[str, ...] = ()
) -> Call:
    call = ChatCompletions().parse({"messages": [], **(body or {})})
    name_session(call, path, {name.encode(): value.encode() for name, value in headers.items()}, ignored, NATIVE_IDS)
    return call


@pytest.mark.parametrize(
    ("body", "user_id"),
    [
        ({"user": "kim"}, "kim"),
        ({"user": "kim", "safety_identifier": "hash-1"}, "hash-1"),
        ({"metadata": {"user_id": "kim"}}, "kim"),
        ({"metadata": {"user_id": f"user_1_account_{THREAD}_session_{UUID}"}}, f"user_1_account_{THREAD}"),
        ({"metadata": {"user_id": f'{{"session_id": "{UUID}"}}'}}, None),
        ({"user": ["kim"]}, None),
        ({"user": "k\0im"}, "kim"),
        ({"user": "\0"}, None),
        ({"user": 600 * "\N{GREEK SMALL LETTER ALPHA}"}, 500 * "\N{GREEK SMALL LETTER ALPHA}"),
    ],
)
def test_the_end_user_of_a_request_is_read(body, user_id):
    assert end_user(named({}, body)) == user_id


@pytest.mark.parametrize(
    ("entry", "headers", "body", "session_id", "agent_id"),
    [
        ("claude-code", {"x-claude-code-session-id": UUID}, {}, f"claude-code:{UUID}", None),
        (
            "claude-code",
            {"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "a1"},
            {},
            f"claude-code:{UUID}",
            "a1",
        ),
        ("codex", {"session-id": UUID, "thread-id": UUID}, {}, f"codex:{UUID}", None),
        ("codex", {"session-id": UUID, "thread-id": THREAD}, {}, f"codex:{UUID}", THREAD),
        ("codex", {"session_id": UUID}, {}, f"codex:{UUID}", None),
        ("litellm", {"x-litellm-session-id": "run 1"}, {}, "litellm:5ab0", None),
        ("session-affinity", {"x-session-affinity": "s1"}, {}, "session-affinity:s1", None),
        ("session-affinity", {"x-affinity": UUID}, {}, f"session-affinity:{UUID}", None),
        (
            "claude-user",
            {},
            {"metadata": {"user_id": f"user_1_account_{THREAD}_session_{UUID}"}},
            f"claude-user:{UUID}",
            None,
        ),
        ("claude-user", {}, {"metadata": {"user_id": f'{{"session_id": "{UUID}"}}'}}, f"claude-user:{UUID}", None),
        ("conversation", {}, {"conversation": "conv_1"}, "conversation:conv_1", None),
        ("conversation", {}, {"conversation": {"id": "conv_1"}}, "conversation:conv_1", None),
        ("prompt-cache-key", {}, {"prompt_cache_key": UUID}, f"prompt-cache-key:{UUID}", None),
        ("x-session-id", {"x-session-id": "ses_1"}, {}, "ses_1", None),
        ("x-session-id", {"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, {}, "ses_1", "ses_2"),
    ],
)
def test_a_native_id_names_the_session_unless_it_is_turned_off(entry, headers, body, session_id, agent_id):
    """An id with characters that are not allowed in a URL is replaced by a digest."""
    call = named(headers, body)
    assert call.session_id is not None
    assert call.session_id == session_id or (" " in "".join(headers.values()) and len(call.session_id) == 40)
    assert (call.session_source, call.agent_id) == (entry, agent_id)
    assert named(headers, body, ignored=(entry,)).session_id is None


@pytest.mark.parametrize(
    "body",
    [
        {"prompt_cache_key": "my-app"},
        {"metadata": {"user_id": "kim"}},
        {"metadata": {"user_id": "{broken"}},
        {"metadata": {"user_id": "{}"}},
        {"conversation": None},
        {"conversation": {"id": 1}},
    ],
)
def test_an_id_that_is_not_unique_to_a_session_names_no_session(body):
    assert named({}, body).session_id is None


def test_an_explicit_session_name_takes_precedence():
    """Order: path, header, metadata, then native ids; the agent is detected in each case."""
    native = {"x-claude-code-session-id": UUID, "x-claude-code-agent-id": "a1"}
    body = {"metadata": {"session_id": "m"}}
    order = [named({**native, "x-session-id": "h"}, body, path="p"), named({**native, "x-session-id": "h"}, body)]
    order += [named(native, body), named(native)]
    assert [call.session_id for call in order] == ["p", "h", "m", f"claude-code:{UUID}"]
    assert {call.agent_id for call in order} == {"a1"}


def test_a_sub_agent_of_opencode_is_named_also_where_the_path_names_the_session():
    call = named({"x-session-id": "ses_2", "x-parent-session-id": "ses_1"}, path="kim-0")
    assert (call.session_id, call.agent_id) == ("kim-0", "ses_2")


def test_a_path_without_its_session_is_refused():
    """As of a base URL `…/sessions/{name}/v1` whose name is empty."""
    with pytest.raises(InvalidRequest, match="a session id has 1 to 256"):
        named({"x-session-id": "h"}, path="")
