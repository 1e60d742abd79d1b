"""Captured traffic as calls that can be made again: who called when, in which session, with which messages."""

from __future__ import annotations

from collections.abc import Iterator

from turnwise.store.session_records import SessionRecord
from turnwise.types import Json


def lines(record: SessionRecord) -> Iterator[Json]:
    """Yield a call per turn of the session, in order; choices beyond the first of one call are left out."""
    for view in record.views():
        turn = view.turn
        if "#" in turn.turn_id:  # a further choice of a call with n > 1
            continue
        body = {"model": turn.model, "messages": view.messages, **turn.sampling}
        if view.tools:
            body["tools"] = view.tools
        yield {
            "session_id": record.session.session_id,
            "turn_id": turn.turn_id,
            "parent_turn_id": turn.parent_turn_id,
            "started_at": turn.created_at.timestamp(),
            "duration_seconds": turn.duration_seconds,
            "sampled_tokens": int(turn.token_ids.size),
            "body": body,
        }
