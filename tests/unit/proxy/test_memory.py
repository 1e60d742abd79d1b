"""The memory of sessions, tokens and conversations: its size, what leaves first, and for which calls it is used."""

import asyncio
from typing import Any

import numpy as np
import orjson
import pytest

from proxy import features
from proxy.auth import Principal
from proxy.dialects.base import Dialect
from proxy.dialects.chat import ChatCompletions
from proxy.sessions.conversation import (
    NO_FIELDS,
    ConversationDigests,
    Conversations,
    message_digest,
)
from proxy.sessions.forest import PIECE_BYTES, EncodedIds, KnownTurn, encode_ids
from proxy.sessions.memory import LiveSession, LiveSessions
from turnwise.types import Json, Session

TEN_IDS = np.full(10, 1234, np.int32)
SIZE = 49 + PIECE_BYTES
"""Ten numbers of four digits, nine commas, and the objects."""


def added(cache: LiveSessions, live: LiveSession, turn_id: str, parent: KnownTurn | None = None) -> KnownTurn:
    before: EncodedIds | None = None if parent is None else parent.tokens
    turn = KnownTurn(
        turn_id=turn_id,
        parent_turn_id=parent and parent.turn_id,
        chain_id="c",
        num_messages=2,
        history_digest=b"h",
        messages_digest=b"m",
        dialogue_digest=b"d",
        tokens=encode_ids(TEN_IDS, before),
    )
    cache.add_turns(live, [turn])
    return turn


def live(cache: LiveSessions, name: str) -> LiveSession:
    session = LiveSession(Session(session_id=name))
    cache.put(session)
    return session


def test_sessions_above_the_limit_are_dropped_and_the_least_recent_first():
    """There is memory for two; the first is used again before the third is added."""
    scratch = LiveSessions(10, 10**6, 10**6)
    sessions = [live(scratch, name) for name in "abc"]
    for session in sessions:
        added(scratch, session, session.session.session_id)
    cache = LiveSessions(10, int(2.4 * sessions[0].num_bytes), 0)
    cache.put(sessions[0])
    cache.put(sessions[1])
    cache.find(sessions[0].key)
    cache.put(sessions[2])
    assert [cache.find(each.key) is not None for each in sessions] == [True, False, True]
    assert cache.num_bytes == sessions[0].num_bytes + sessions[2].num_bytes


def test_the_turns_of_a_chain_share_the_tokens_of_their_ancestors():
    """Nine turns of ten ids each fit into nine times the memory of ten ids, though the last one has 90 ids."""
    cache = LiveSessions(10, 10**6, 9 * SIZE)
    session = live(cache, "s")
    turns = [added(cache, session, "0")]
    for number in range(1, 9):
        turns.append(added(cache, session, str(number), turns[-1]))
    assert all(turn.tokens is not None for turn in turns)
    assert turns[-1].tokens.decoded().tolist() == [1234] * 90


def test_the_tokens_of_the_least_recently_used_session_are_dropped_first():
    """There is memory for two turns, not for three."""
    cache = LiveSessions(10, 10**6, 2 * SIZE)
    sessions = [live(cache, "a"), live(cache, "b")]
    first = added(cache, sessions[0], "1")
    second = added(cache, sessions[1], "2")
    third = added(cache, sessions[0], "3", first)
    assert [turn.tokens is not None for turn in (first, second, third)] == [True, False, True]


OWNER = ("tenant", "session", "s", b"")
FIRST: list[Json] = [{"role": "user", "content": "A", "x": 1}, {"role": "assistant", "content": "B"}]
SECOND: list[Json] = [*FIRST, {"role": "system", "content": "C"}, {"role": "user", "content": "D"}]
TEXTS = [f"text {number} {'x' * 50}" for number in range(300)]
ROLES = ["assistant" if number % 2 else "user" for number in range(300)]


CALLER = Principal(tenant="tenant", role="agent", key_id="k", root_key_id="k")


def read_chat(messages: list[Json], conversations: Conversations, session_id: str = "s") -> ConversationDigests:
    call = ChatCompletions().parse({"messages": messages})
    call.session_id = session_id
    return asyncio.run(conversations.read(call, CALLER, NO_FIELDS))


def kept() -> Conversations:
    conversations = Conversations(10**6)
    read_chat(FIRST, conversations)
    return conversations


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
def test_other_messages_are_digested_as_a_whole(messages):
    """Also those that Python calls equal: JSON distinguishes 1, 1.0 and true, and so does the engine."""
    assert kept().find(OWNER, orjson.dumps(messages))[0] is None


@pytest.mark.parametrize(
    "other",
    [
        ("other", "session", "s", b""),
        ("tenant", "key", "s", b""),
        ("tenant", "session", "t", b""),
        ("tenant", "session", "s", b"x"),
    ],
)
def test_the_messages_of_another_owner_are_not_used(other):
    assert kept().find(other, orjson.dumps(SECOND))[0] is None


def test_the_longest_conversation_is_found_and_replaced_by_what_extends_it():
    conversations = kept()
    second = read_chat(SECOND, conversations)
    assert conversations.find(OWNER, orjson.dumps(SECOND))[0] is second
    assert conversations[OWNER] == (second,)
    third = read_chat(SECOND, conversations)
    assert conversations[OWNER] == (third,)
    other = read_chat(FIRST[:1], conversations)
    assert conversations[OWNER] == (third, other)
    assert conversations.find(OWNER, orjson.dumps(SECOND))[0] is third


def test_the_conversations_of_the_owner_that_called_first_are_dropped_above_the_limit():
    """Each takes 1,200 bytes and 210 for each of two messages: 4,000 bytes hold two."""
    conversations = Conversations(4_000)
    for name in "abc":
        read_chat(FIRST, conversations, name)
    assert [name for *_, name, _ in conversations] == ["b", "c"]
    read_chat(FIRST * 8, conversations)  # too long to be kept
    assert len(conversations) == 2


def body_of(dialect: Dialect, num_messages: int) -> Json:
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
    [each for each in features.DIALECTS if each.name != "completions"],
    ids=[each.name for each in features.DIALECTS if each.name != "completions"],
)
def test_every_dialect_digests_only_the_messages_that_are_new(dialect, monkeypatch):
    """The history and the engine's messages are those of a call that nothing is known of."""
    digested: list[Json] = []

    def digest(message: Json, *args: Any) -> bytes:
        digested.append(message)
        return message_digest(message, *args)

    def read(num_messages: int, conversations: Conversations) -> tuple[ConversationDigests, bytes, list[Json]]:
        call = dialect.parse(body_of(dialect, num_messages))
        call.session_id = "s"
        found = asyncio.run(conversations.read(call, CALLER, NO_FIELDS))
        return found, call.messages_json, call.messages

    monkeypatch.setattr("proxy.sessions.conversation.message_digest", digest)
    conversations = Conversations(10**7)
    read(281, conversations)
    digested.clear()
    again, sent, messages = read(283, conversations)
    assert [message["content"] for message in digested] == TEXTS[281:283]
    fresh, expected, _ = read(283, Conversations(10**7))
    for name in ("full", "messages", "dialogue", "replies"):
        assert getattr(again, name) == getattr(fresh, name)
    assert sent == expected == orjson.dumps(messages)
