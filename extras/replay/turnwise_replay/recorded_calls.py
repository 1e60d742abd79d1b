"""Captured traffic as calls that can be made again: who called when, in which session, with which messages."""

from __future__ import annotations

import datetime
from collections.abc import Iterator

from turnwise.types import Json


def lines(session: Json) -> Iterator[Json]:
    """Yield a call per turn of the session, in order; choices beyond the first of one call are left out."""
    for turn in session["turns"]:
        if "#" in turn["turn_id"]:  # a further choice of a call with n > 1
            continue
        body = {"model": turn["model"], "messages": turn["messages"], **turn["sampling"]}
        if turn["tools"]:
            body["tools"] = turn["tools"]
        yield {
            "session_id": session["session_id"],
            "turn_id": turn["turn_id"],
            "parent_turn_id": turn["parent_turn_id"],
            "started_at": datetime.datetime.fromisoformat(turn["created_at"]).timestamp(),
            "duration_seconds": turn["duration_seconds"],
            "sampled_tokens": len(turn["token_ids"]),
            "body": body,
        }
