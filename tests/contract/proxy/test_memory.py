"""The memory that the caches count is what their objects take, and limits drop what was used least recently."""

from __future__ import annotations

import gc
import tracemalloc
import uuid
from collections.abc import Callable, Iterator

import numpy as np
import orjson
import pytest

from proxy.continuation.conversation import Prefixes, prefix_of
from proxy.continuation.digests import digest_history, tool_call_ids
from proxy.continuation.encoded_ids import encode_ids
from proxy.continuation.forest import KnownTurn
from proxy.continuation.memory import LiveSession, LiveSessions, TokenCache
from proxy.continuation.outline import Outliner
from turnwise.types import Json, Session

TEN_IDS = np.full(10, 1234, np.int32)


def text_messages(number: int) -> list[Json]:
    return [{"role": "user", "content": f"Question {number}."}, {"role": "assistant", "content": f"Answer {number}."}]


def tool_messages(number: int) -> list[Json]:
    arguments = orjson.dumps({"command": f"sed -n {number},80p module.py"}).decode()
    call = {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": {"name": "shell", "arguments": arguments}}
    return [
        {"role": "tool", "tool_call_id": "c", "content": f"{number} lines " * 40},
        {"role": "assistant", "content": "I read on.", "tool_calls": [call]},
    ]


def unicode_messages(number: int) -> list[Json]:
    """Return messages whose characters take four bytes each."""
    return [{"role": "user", "content": f"{number} 🙂" + "x" * 500}, {"role": "assistant", "content": "🙂" * 100}]


SHAPES = [text_messages, tool_messages, unicode_messages]


def session_of(messages_of: Callable[[int], list[Json]], name: str, num_turns: int) -> LiveSession:
    """Return a session of one chain, as committed turns leave it in memory."""
    live, messages, parent = LiveSession(Session(session_id=name)), [], None
    for number in range(num_turns):
        prompt, reply = messages_of(number)
        messages.append(prompt)
        history = digest_history(messages, b"")
        full, plain, dialogue, state = history.extended(reply)
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
            messages_state=state,
            reasoning=str(number) * 300,
            call_ids=tuple(tool_call_ids(reply)),
            started_at=number + 0.5,
            ended_at=number + 1.5,
        )
        live.forest.add(turn)
        messages.append(reply)
        parent = turn
    return live


@pytest.fixture
def traced() -> Iterator[Callable[[], int]]:
    """Return the memory that was allocated since the test began."""

    def measured() -> int:
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    yield measured
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("messages_of", "num_turns"),
    [
        (text_messages, 1),
        (tool_messages, 20),
        (unicode_messages, 60),
        *(pytest.param(shape, number, marks=pytest.mark.slow) for shape in SHAPES for number in (1, 5, 20, 60)),
    ],
)
def test_the_counted_memory_of_sessions_is_what_they_take(
    messages_of: Callable[[int], list[Json]], num_turns: int, traced: Callable[[], int]
):
    num_sessions = 240 // num_turns
    session_of(messages_of, "first", 2)
    before = traced()
    sessions = [session_of(messages_of, f"s{number}", num_turns) for number in range(num_sessions)]
    assert sum(live.num_bytes for live in sessions) == pytest.approx(traced() - before, rel=0.3)


@pytest.mark.parametrize(
    ("messages_of", "num_messages"),
    [
        (text_messages, 40),
        (tool_messages, 400),
        (unicode_messages, 40),
        *(pytest.param(shape, number, marks=pytest.mark.slow) for shape in SHAPES for number in (40, 400)),
    ],
)
def test_the_counted_memory_of_prefixes_is_what_they_take(
    messages_of: Callable[[int], list[Json]], num_messages: int, traced: Callable[[], int]
):
    """With the digests and the outlines of their messages."""
    prefixes, outliner, owner = Prefixes(10**9), Outliner(["</think>"]), ("t", "key", "k")

    def play(number: int) -> None:
        messages = [each for at in range(num_messages // 2) for each in messages_of(at)]
        text = orjson.dumps([*messages, {"role": "user", "content": str(number)}])
        for _ in range(2):
            prefix = prefix_of(text, digest_history(messages, b""))
            outliner.shortened(messages, len(messages), prefix.outlines)
            prefixes.keep(owner, prefix, prefixes.find(owner, text))

    play(-1)
    before, counted = traced(), prefixes.num_bytes
    for number in range(400 // num_messages):
        play(number)
    assert prefixes.num_bytes - counted == pytest.approx(traced() - before, rel=0.4)


def test_sessions_above_the_limit_are_dropped_and_the_least_recent_first():
    """There is memory for two; the first is used again before the third is added."""
    sessions = [session_of(text_messages, name, 3) for name in "abc"]
    live = LiveSessions(10, int(sum(each.num_bytes for each in sessions[:2]) * 1.2), TokenCache(0))
    live.put(sessions[0])
    live.put(sessions[1])
    live.find(sessions[0].key)
    live.put(sessions[2])
    assert [live.find(each.key) is not None for each in sessions] == [True, False, True]
    assert live.num_bytes == sessions[0].num_bytes + sessions[2].num_bytes


def test_turns_of_a_session_count_and_those_of_a_dropped_session_do_not():
    """The only session is kept although it is too large; the next one replaces it."""
    tokens = TokenCache(10**6)
    live, first = LiveSessions(10, 0, tokens), session_of(text_messages, "a", 1)
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
