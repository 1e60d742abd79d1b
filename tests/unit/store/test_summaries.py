"""Summaries of sessions: what was said first and last, in any shape, and the sampled tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from support.ledger_samples import make_turn

from turnwise.store import search, sessions
from turnwise.store.database import Database
from turnwise.store.turns import append_turns
from turnwise.types import Outcome, Session


@pytest.fixture
def connection(database: Database) -> Iterator[sa.Connection]:
    with database.write() as conn:
        yield conn


def play(conn: sa.Connection, session_id: str, *turns: dict[str, Any]) -> None:
    sessions.create_session(conn, Session(session_id=session_id))
    for number, fields in enumerate(turns):
        turn = make_turn(f"t{number}", session_id=session_id, **fields)
        append_turns(conn, [dataclasses.replace(turn, turn_id=f"{session_id}-{number}")])


def summarise(conn: sa.Connection, *session_ids: str) -> list[search.Summary]:
    return search.summaries(conn, [sessions.read_session(conn, "default", each) for each in session_ids])


def test_a_summary_has_the_first_question_the_last_reply_and_the_sampled_tokens(connection: sa.Connection) -> None:
    asked = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "An example of the agent's."},
        {"role": "assistant", "content": "Its reply."},
        {"role": "user", "content": [{"type": "text", "text": "Hi \n you"}]},
    ]
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}
    play(connection, "asks", {"messages": asked}, {"response": called, "outcome": Outcome.ABORTED})
    play(connection, "empty")
    first, empty = summarise(connection, "asks", "empty")
    assert (first.first_message, first.last_reply) == ("Hi you", "calls find")
    assert (first.last_outcome, first.num_sampled_tokens) == ("aborted", 4)
    assert empty == search.Summary(num_sampled_tokens=0)


def test_a_text_of_any_shape_is_summarised_and_a_long_one_is_cut_or_not_read(connection: sa.Connection) -> None:
    odd: list[dict[str, Any]] = [{"role": "user", "content": None}, {"role": "user", "content": [None, 5, {"text": 3}]}]
    play(connection, "odd", {"messages": odd, "response": {"content": "x" * 1_000}})
    play(connection, "long", {"messages": [{"role": "user", "content": "x" * search.MAX_TEXT_BYTES}], "response": {}})
    odd_one, long_one = summarise(connection, "odd", "long")
    assert odd_one.first_message is None
    assert odd_one.last_reply == "x" * 299 + "…"
    assert (long_one.first_message, long_one.last_reply) == (None, None)
