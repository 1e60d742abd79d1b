"""What was said in sessions, in short: what the user asked first and the last reply, for lists that people read.

A summary is computed when it is asked for. Texts of more than `MAX_BYTES` are not read, so that a page of sessions with
long prompts stays cheap.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
import sqlalchemy as sa

from turnwise.store.statements import is_among, size_of
from turnwise.store.tables import sessions, turns
from turnwise.types import Json, Session

MAX_BYTES = 256 * 1024
"""A first prompt or a last reply with more stored bytes is not read."""
MAX_TURNS = 1_000
"""The tokens of a session with more turns are not counted."""
MAX_CHARACTERS = 300
"""Length at which a text is cut."""
ID_BYTES = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What was said in a session, in short; a text is null if there is none, or if it is too long to be read here."""

    first_message: str | None = None
    """The start of the user's message that the first turn answers; those before it may be examples of the agent's."""
    last_reply: str | None = None
    """The start of the last reply; of a reply without text, the names of the tools that it calls."""
    last_outcome: str | None = None
    """Outcome of the last turn; null without a turn."""
    num_sampled_tokens: int | None = None
    """Sampled tokens of all turns; null for a session with more than 1,000 turns."""


def summaries(conn: sa.Connection, found: Sequence[Session]) -> list[Summary]:
    """Return the summaries of sessions of one tenant, in their order."""
    if not found:
        return []
    dialect, held = conn.dialect, turns.c
    is_found = is_among(conn.dialect, sessions.c.session_id, [session.session_id for session in found])
    of_sessions = [sessions.c.tenant == found[0].tenant, is_found]
    joined = sa.select(sessions.c.session_id, held.seq).join_from(turns, sessions).where(*of_sessions)
    begins = joined.add_columns(_short(dialect, held.messages)).where(held.seq == 0)
    ends = joined.add_columns(_short(dialect, held.response), held.outcome).where(held.seq == sessions.c.num_turns - 1)
    count = (
        sa.select(sessions.c.session_id, sa.func.sum(size_of(dialect, held.token_ids)))
        .join_from(turns, sessions)
        .where(*of_sessions, sessions.c.num_turns <= MAX_TURNS)
        .group_by(sessions.c.session_id)
    )
    first = {row.session_id: row[2] for row in conn.execute(begins)}
    last = {row.session_id: row for row in conn.execute(ends)}
    num_bytes = {row[0]: row[1] for row in conn.execute(count)}
    return [
        Summary(
            first_message=_first_message(first.get(session.session_id)),
            last_reply=_last_reply(last[session.session_id][2]) if session.session_id in last else None,
            last_outcome=last[session.session_id].outcome if session.session_id in last else None,
            num_sampled_tokens=(
                None if session.num_turns > MAX_TURNS else int(num_bytes.get(session.session_id) or 0) // ID_BYTES
            ),
        )
        for session in found
    ]


def _short(dialect: sa.Dialect, column: sa.Column[Any]) -> sa.ColumnElement[str | None]:
    return sa.case((size_of(dialect, column) <= MAX_BYTES, column), else_=None)


def _first_message(stored: str | None) -> str | None:
    messages = orjson.loads(stored) if stored else []
    said = [text for message in messages if message.get("role") == "user" and (text := _text(message.get("content")))]
    return _cut(said[-1]) if said else None


def _last_reply(stored: str | None) -> str | None:
    reply: Json = orjson.loads(stored) if stored else {}
    calls = (call.get("function") or {} for call in reply.get("tool_calls") or () if isinstance(call, dict))
    named = ", ".join(f"calls {call.get('name')}" for call in calls)
    return _cut(_text(reply.get("content")) or named) or None


def _text(content: Any) -> str:
    """Return the text of a message's content, which a client may send in any shape."""
    return " ".join(" ".join(_texts(content)).split())


def _texts(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        for part in content:
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                yield part["text"]


def _cut(text: str) -> str:
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
