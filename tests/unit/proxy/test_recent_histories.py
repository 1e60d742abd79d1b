"""The history of a session's last call is used again only for the same messages, within its memory."""

from __future__ import annotations

import tracemalloc

import orjson
import pytest

from proxy.continuation.digests import digest_history
from proxy.continuation.recent_histories import HISTORY_BYTES, MESSAGE_BYTES, RecentHistories
from turnwise.types import Json

FIRST: list[Json] = [{"role": "user", "content": "A", "x": 1}, {"role": "assistant", "content": "B"}]
SESSION = ("tenant", "s")


def kept(*sessions: str, max_bytes: int = 10**6) -> RecentHistories:
    recent = RecentHistories(max_bytes)
    for session_id in sessions:
        recent.keep(("tenant", session_id), orjson.dumps(FIRST), digest_history(FIRST, b""))
    return recent


def test_a_continued_history_is_the_history_of_the_whole_conversation() -> None:
    messages = [*FIRST, {"role": "system", "content": "C"}, {"role": "user", "content": "D"}]
    earlier = kept("s").find(SESSION, orjson.dumps(messages))
    assert earlier is not None
    continued, whole = digest_history(messages, b"", earlier=earlier), digest_history(messages, b"")
    assert (continued.full, continued.messages, continued.dialogue) == (whole.full, whole.messages, whole.dialogue)
    assert len(earlier.full) == 2  # it was not changed


@pytest.mark.parametrize(
    "messages",
    [
        FIRST[:1],
        [{**FIRST[0], "x": True}, FIRST[1]],
        [{**FIRST[0], "x": 1.0}, FIRST[1]],
        [FIRST[0], {"role": "assistant", "content": "other"}, FIRST[0]],
        [FIRST[0], {**FIRST[1], "x": 1}],
    ],
)
def test_other_messages_are_digested_as_a_whole(messages: list[Json]) -> None:
    """Also those that Python calls equal: JSON distinguishes 1, 1.0 and true, and so does the engine."""
    assert kept("s").find(SESSION, orjson.dumps(messages)) is None
    assert kept("other").find(SESSION, orjson.dumps(FIRST)) is None


def test_the_least_recently_used_histories_are_dropped():
    """Each takes its text and its digests; there is memory for two, and the first session is used again."""
    num_bytes = HISTORY_BYTES + len(orjson.dumps(FIRST)[:-1]) + 2 * MESSAGE_BYTES
    recent = kept("a", "b", "a", "c", max_bytes=2 * num_bytes)
    found = [recent.find(("tenant", session_id), orjson.dumps(FIRST)) is not None for session_id in ("a", "b", "c")]
    assert found == [True, False, True]


def test_a_history_that_takes_all_memory_drops_no_other():
    recent = kept("a", max_bytes=20_000)
    recent.keep(SESSION, orjson.dumps([{"role": "user", "content": "x" * 20_000}]), digest_history(FIRST, b""))
    assert recent.find(("tenant", "a"), orjson.dumps(FIRST)) is not None


@pytest.mark.parametrize("num_messages", [0, 1, 30])
def test_histories_take_no_more_memory_than_allowed(num_messages: int):
    """Also those of calls without messages, or with one: their running hashes take most of it."""
    messages = [{"role": "user", "content": "Hi."}] * num_messages
    recent = RecentHistories(max_bytes=400_000)
    tracemalloc.start()
    try:
        for number in range(400):
            recent.keep(("tenant", str(number)), orjson.dumps(messages), digest_history(messages, b""))
        assert tracemalloc.get_traced_memory()[0] < 500_000
    finally:
        tracemalloc.stop()
