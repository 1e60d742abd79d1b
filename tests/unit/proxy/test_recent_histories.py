"""The history of a session's last call is used again only for the same messages, within its memory."""

from __future__ import annotations

import pytest

from proxy.continuation.digests import digest_history
from proxy.continuation.recent_histories import MESSAGE_BYTES, RecentHistories
from turnwise.types import Json

FIRST: list[Json] = [{"role": "user", "content": "A", "x": 1}, {"role": "assistant", "content": "B"}]
SESSION = ("tenant", "s")


def kept(*sessions: str, max_bytes: int = 10**6) -> RecentHistories:
    recent = RecentHistories(max_bytes)
    for session_id in sessions:
        recent.keep(("tenant", session_id), FIRST, digest_history(FIRST, b""))
    return recent


def test_a_continued_history_is_the_history_of_the_whole_conversation() -> None:
    messages = [*FIRST, {"role": "system", "content": "C"}, {"role": "user", "content": "D"}]
    earlier = kept("s").find(SESSION, messages)
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
    ],
)
def test_other_messages_are_digested_as_a_whole(messages: list[Json]) -> None:
    """Also those that Python calls equal: JSON distinguishes 1, 1.0 and true, and so does the engine."""
    assert kept("s").find(SESSION, messages) is None
    assert kept("other").find(SESSION, FIRST) is None


def test_the_least_recently_used_histories_are_dropped() -> None:
    """Each takes its text and its digests; there is memory for two, and the first session is used again."""
    num_bytes = len(b'[{"role":"user","content":"A","x":1},{"role":"assistant","content":"B"}]') + 2 * MESSAGE_BYTES
    recent = kept("a", "b", "a", "c", max_bytes=2 * num_bytes)
    found = [recent.find(("tenant", session_id), FIRST) is not None for session_id in ("a", "b", "c")]
    assert found == [True, False, True]
