"""The memory that the caches count is what their objects take, and limits drop what was used least recently."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import numpy as np
from support.conversations import digest_history

from proxy.continuation.digests import tool_call_ids
from proxy.continuation.encoded_ids import encode_ids
from proxy.continuation.forest import KnownTurn
from proxy.continuation.memory import LiveSession, LiveSessions
from turnwise.types import Json, Session

TEN_IDS = np.full(10, 1234, np.int32)


def text_messages(number: int) -> list[Json]:
    return [{"role": "user", "content": f"Question {number}."}, {"role": "assistant", "content": f"Answer {number}."}]


def session_of(messages_of: Callable[[int], list[Json]], name: str, num_turns: int) -> LiveSession:
    """Return a session of one chain, as committed turns leave it in memory."""
    live, messages, parent = LiveSession(Session(session_id=name)), [], None
    for number in range(num_turns):
        prompt, reply = messages_of(number)
        messages.append(prompt)
        history = digest_history(messages, b"")
        full, plain, dialogue = history.extended(reply)
        turn_id = f"chatcmpl-{uuid.uuid4().hex}"
        turn = KnownTurn(
            turn_id=turn_id,
            parent_turn_id=None if parent is None else str(parent.turn_id),
            chain_id=str(turn_id if parent is None else parent.chain_id),
            num_messages=len(messages) + 1,
            history_digest=full,
            messages_digest=plain,
            dialogue_digest=dialogue,
            prompt_digest=history.messages[-1],
            reasoning=str(number) * 300,
            call_ids=tuple(tool_call_ids(reply)),
            started_at=number + 0.5,
            ended_at=number + 1.5,
        )
        live.forest.add(turn)
        messages.append(reply)
        parent = turn
    return live


def test_sessions_above_the_limit_are_dropped_and_the_least_recent_first():
    """There is memory for two; the first is used again before the third is added."""
    sessions = [session_of(text_messages, name, 3) for name in "abc"]
    live = LiveSessions(10, int(sum(each.num_bytes for each in sessions[:2]) * 1.2), 0)
    live.put(sessions[0])
    live.put(sessions[1])
    live.find(sessions[0].key)
    live.put(sessions[2])
    assert [live.find(each.key) is not None for each in sessions] == [True, False, True]
    assert live.num_bytes == sessions[0].num_bytes + sessions[2].num_bytes


def test_turns_of_a_session_count_and_those_of_a_dropped_session_do_not():
    """The only session is kept although it is too large; the next one replaces it."""
    live, first = LiveSessions(10, 0, 10**6), session_of(text_messages, "a", 1)
    second = LiveSession(Session(session_id="b"))
    live.put(first)
    (turn,) = first.forest.by_id.values()
    turn.tokens = encode_ids(TEN_IDS)
    live.keep_tokens(first, turn)
    assert live.num_bytes == first.num_bytes
    live.put(second)
    assert (len(live), live.num_bytes, turn.tokens) == (1, second.num_bytes, None)
    live.add_turns(first, list(session_of(text_messages, "a", 3).forest.by_id.values()))
    assert live.num_bytes == second.num_bytes
    live.clear()
    assert (len(live), live.num_bytes) == (0, 0)
