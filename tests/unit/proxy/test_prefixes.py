"""What was derived from the messages of an earlier call is used only for calls that begin with the same messages."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from support.conversations import digest_history

from proxy.dialects import registry
from proxy.dialects.base import Dialect
from proxy.sessions.conversation import Conversation, Owner, Prefixes, prefix_of, read_conversation
from proxy.sessions.digests import NO_FIELDS, message_digest
from turnwise.types import Json

OWNER = ("tenant", "session", "s", b"")
FIRST: list[Json] = [{"role": "user", "content": "A", "x": 1}, {"role": "assistant", "content": "B"}]
SECOND: list[Json] = [*FIRST, {"role": "system", "content": "C"}, {"role": "user", "content": "D"}]
TEXTS = [f"text {number} {'x' * 50}" for number in range(300)]
ROLES = ["assistant" if number % 2 else "user" for number in range(300)]


def kept(*owners: Owner, max_bytes: int = 10**6) -> Prefixes:
    prefixes = Prefixes(max_bytes)
    for owner in owners:
        prefixes.keep(owner, prefix_of(orjson.dumps(FIRST), digest_history(FIRST, b"")), None)
    return prefixes


def test_a_continued_history_is_the_history_of_the_whole_conversation() -> None:
    earlier = kept(OWNER).find(OWNER, orjson.dumps(SECOND))[0]
    assert earlier is not None
    continued, whole = earlier.history.copy(), digest_history(SECOND, b"")
    continued.extend(SECOND[2:])
    assert (continued.full, continued.messages, continued.dialogue) == (whole.full, whole.messages, whole.dialogue)
    assert len(earlier.history.full) == 2  # it was not changed


@pytest.mark.parametrize(
    "messages",
    [
        FIRST[:1],
        [{**FIRST[0], "x": True}, FIRST[1]],
        [{**FIRST[0], "x": 1.0}, FIRST[1]],
        [{**FIRST[0], "content": "a"}, FIRST[1]],
        [FIRST[0], {"role": "assistant", "content": "other"}, FIRST[0]],
        [FIRST[0], {**FIRST[1], "x": 1}],
    ],
)
def test_other_messages_are_digested_as_a_whole(messages: list[Json]) -> None:
    """Also those that Python calls equal: JSON distinguishes 1, 1.0 and true, and so does the engine."""
    assert kept(OWNER).find(OWNER, orjson.dumps(messages))[0] is None


@pytest.mark.parametrize(
    "other",
    [
        ("other", "session", "s", b""),
        ("tenant", "key", "s", b""),
        ("tenant", "session", "t", b""),
        ("tenant", "session", "s", b"x"),
    ],
)
def test_the_messages_of_another_owner_are_not_used(other: Owner) -> None:
    assert kept(OWNER).find(other, orjson.dumps(SECOND))[0] is None


def test_the_longest_prefix_is_found_and_replaced_by_what_extends_it() -> None:
    prefixes = kept(OWNER)
    text = orjson.dumps(SECOND)
    second = prefix_of(text, digest_history(SECOND, b""))
    prefixes.keep(OWNER, second, None)
    assert prefixes.find(OWNER, text)[0] is second
    num_bytes = prefixes.num_bytes
    prefixes.keep(OWNER, third := prefix_of(text, second.history), second)
    assert prefixes.find(OWNER, text)[0] is third
    assert prefixes.num_bytes == num_bytes


def body_of(dialect: Dialect, num_messages: int) -> Json:
    """Return a request with the first messages of one long conversation."""
    turns: list[Json] = [{"role": role, "content": text} for role, text in zip(ROLES, TEXTS, strict=True)]
    turns = turns[:num_messages]
    match dialect.name:
        case "responses":
            return {"input": turns, "instructions": "Be brief."}
        case "gemini":
            parts = [{"text": turn["content"]} for turn in turns]
            roles = ["model" if turn["role"] == "assistant" else "user" for turn in turns]
            return {"contents": [{"role": role, "parts": [part]} for role, part in zip(roles, parts, strict=True)]}
        case _:
            return {"messages": turns, "max_tokens": 4}


@pytest.mark.parametrize(
    "dialect",
    [each for each in registry.DIALECTS if each.name != "completions"],
    ids=[each.name for each in registry.DIALECTS if each.name != "completions"],
)
def test_every_dialect_digests_only_the_messages_that_are_new(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The history and the engine's messages are those of a call that nothing is known of."""
    digested: list[Json] = []

    def digest(message: Json, *args: Any) -> bytes:
        digested.append(message)
        return message_digest(message, *args)

    def read(num_messages: int, prefixes: Prefixes) -> tuple[Conversation, bytes]:
        call = dialect.parse(body_of(dialect, num_messages), max_choices=1, max_messages=10_000)
        found = asyncio.run(read_conversation(call, NO_FIELDS, prefixes, OWNER))
        return found, call.messages_json

    monkeypatch.setattr("proxy.sessions.digests.message_digest", digest)
    prefixes = Prefixes(10**7)
    read(281, prefixes)
    digested.clear()
    again, sent = read(283, prefixes)
    assert [message["content"] for message in digested] == TEXTS[281:283]
    fresh, expected = read(283, Prefixes(10**7))
    assert (again.history.full, again.history.replies) == (fresh.history.full, fresh.history.replies)
    assert sent == expected == orjson.dumps(again.messages)
