"""Plans of the statements that routes, the proxy, the trainer and the page send: none scans a table that grows."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from support.ledger_samples import add_session, finish, make_turn

from turnwise.store import (
    arms,
    changes,
    claims,
    engine_activity,
    evaluations,
    experiences,
    groups,
    history,
    idempotency,
    ledger,
    opening,
    policies,
    queries,
    retention,
    search,
    session_changes,
    trained,
    update_summaries,
)
from turnwise.store.database import Database
from turnwise.store.experiences import SessionFilter
from turnwise.store.search import Contents
from turnwise.types import Label, Outcome, Reward, Session, SessionStatus, Split, Turn, utc_now

GROWING = "sessions|turns|rewards|groups|idempotency|trained_sessions|session_labels|engine_minutes"
A_SCAN = re.compile(rf"^SCAN ({GROWING})\b")
NOW = utc_now()
WEEK = datetime.timedelta(days=7)
EVERYTHING = Contents(min_reward=0.0, outcome=Outcome.EXACT, reason="r", policy_version=0, text="question")
Ask = Callable[[sa.Connection], Any]

ASKS: dict[str, Ask] = {
    "a page of sessions": lambda c: queries.sessions(c, SessionFilter(tenant="t")),
    "a later page": lambda c: queries.sessions(c, SessionFilter(tenant="t"), after="s"),
    "sessions of a task": lambda c: queries.sessions(c, SessionFilter(tenant="t", task_id="x")),
    "sessions of a group": lambda c: queries.sessions(c, SessionFilter(tenant="t", group_id="g")),
    "labelled sessions": lambda c: queries.sessions(c, SessionFilter(tenant="t", label="golden")),
    "labelled sessions of all tenants": lambda c: queries.sessions(c, SessionFilter(label="golden")),
    "a search": lambda c: search.search_sessions(c, SessionFilter(tenant="t"), EVERYTHING),
    "changes": lambda c: changes.read_state(c, "t"),
    "summaries of updates": lambda c: update_summaries.summarise_updates(c, "t"),
    "the credit of a session": lambda c: experiences.session_credit(c, 1),
    "open sessions": lambda c: queries.sessions(c, SessionFilter(tenant="t", status=SessionStatus.OPEN)),
    "a page of turns": lambda c: queries.turns(c, "t", "s", whole_prompt=False),
    "whole turns": lambda c: queries.turns(c, "t", "s"),
    "a turn": lambda c: queries.turn(c, "t", "t-s-t1"),
    "an added turn": lambda c: queries.turn(c, "t", "t-s-t1", whole_prompt=False),
    "a turn's tokens": lambda c: history.full_tokens(c, "t-s-t1"),
    "a session's unknown turns": lambda c: history.unknown_turns(c, "t", "s", first=0, known=()),
    "a conversation": lambda c: history.sessions_of_conversation(c, "t", "k", [b"d"], limit=4),
    "a conversation of the Responses API": lambda c: history.newest_in_conversation(c, "t", "s", "conv"),
    "a repeated call": lambda c: queries.turn_by_request(c, "t", "s", "key"),
    "counts of a tenant": lambda c: queries.counts(c, "t"),
    "groups for the metrics": queries.unfinished_groups,
    "experiences of a tenant": lambda c: list(experiences.experiences(c, SessionFilter(tenant="t"))),
    "experiences of groups": lambda c: list(experiences.experiences_of_groups(c, [1])),
    "updates": lambda c: trained.list_updates(c, "t"),
    "last updates of sessions": lambda c: trained.last_updates(c, "t", ["s"]),
    "claimable groups": claims.num_claimable,
    "the oldest version in flight": lambda c: claims.oldest_version_in_flight(c, NOW - WEEK),
    "a canary's arms": lambda c: arms.arms_since(c, NOW - WEEK, (0, 1)),
    "versions of an evaluation": lambda c: evaluations.versions_sampled(c, [("t", "s")]),
    "the newest eval sessions": lambda c: queries.sessions(c, SessionFilter(split=Split.EVAL), limit=10),
    "policies": policies.list_policies,
    "idle shares of engines": lambda c: engine_activity.idle_shares(c, [(NOW - WEEK, NOW)]),
}
CHANGES: dict[str, Ask] = {
    "a new session": lambda c: ledger.create_session(c, Session(session_id="n", tenant="t", group_id="g2")),
    "sessions of calls": lambda c: opening.open_sessions(
        c, [Session(session_id=name, tenant="t") for name in ("n", "m", "s")]
    ),
    "a changed session": lambda c: session_changes.change_session(
        c, Session(session_id="s", tenant="t", metadata={"a": 1}), {"metadata"}
    ),
    "a turn": lambda c: ledger.append_turns(c, [_turn()]),
    "rewards": lambda c: ledger.add_rewards(
        c,
        [
            Reward(session_id="s", tenant="t", value=1.0),
            Reward(session_id="s", tenant="t", step=0, value=1.0),
            Reward(session_id="", turn_id="t-s-t1", tenant="t", value=1.0),
        ],
        idempotency_key="k",
        retrain=True,
    ),
    "a label": lambda c: session_changes.set_label(c, "t", "s", Label(label="golden")),
    "a removed label": lambda c: session_changes.remove_label(c, "t", "s", "golden"),
    "an end": lambda c: ledger.end_session(c, "t", "s"),
    "idle sessions": lambda c: ledger.expire_idle_sessions(c, NOW + WEEK),
    "stalled groups": lambda c: groups.close_stalled_groups(c, NOW + WEEK, "train"),
    "stalled groups to drop": lambda c: groups.close_stalled_groups(c, NOW + WEEK, "drop"),
    "old answers": lambda c: idempotency.forget_answers(c, NOW - WEEK),
    "old sessions": lambda c: retention.prune(c, NOW - WEEK),
    "a deleted session": lambda c: retention.delete_session(c, "t", "s"),
    "a deleted tenant": lambda c: retention.delete_tenant(c, "nobody"),
}


def _turn() -> Turn:
    return make_turn("t9", session_id="s", tenant="t", request_key="k")


@pytest.fixture
def ledger_of_a_tenant(database: Database) -> Database:
    add_session(database, "s", tenant="t", turns=2)
    add_session(database, "over", tenant="t")
    finish(database, "over", tenant="t")
    return database


def plans(conn: sa.Connection, ask: Ask) -> Iterator[str]:
    """Yield each line of the plan of each statement that a function sends."""
    driver_connection = conn.connection.driver_connection
    assert driver_connection is not None
    sent: list[str] = []
    driver_connection.set_trace_callback(sent.append)
    ask(conn)
    driver_connection.set_trace_callback(None)
    for statement in sent:
        if re.match(r"(?i)\s*(select|with|insert|update|delete)\b", statement):
            for *_, line in driver_connection.execute(f"EXPLAIN QUERY PLAN {statement}"):
                yield f"{line}\n    in {statement}"


@pytest.mark.parametrize("dialect", ["sqlite"])
@pytest.mark.parametrize("name", ASKS)
def test_no_query_scans_a_table_that_grows(ledger_of_a_tenant: Database, name: str) -> None:
    with ledger_of_a_tenant.read() as conn:
        assert [line for line in plans(conn, ASKS[name]) if A_SCAN.match(line)] == []


OF_A_TENANT = ("a page of sessions", "a later page", "open sessions", "a search", "changes", "counts of a tenant")
OTHERS_TOO = re.compile(r"^SEARCH (sessions|groups)\b(?!.*\((tenant=|session_pk=|INTEGER PRIMARY KEY|rowid))")


@pytest.mark.parametrize("dialect", ["sqlite"])
@pytest.mark.parametrize("name", OF_A_TENANT)
def test_a_query_of_a_tenant_neither_reads_other_tenants_rows_nor_sorts(
    ledger_of_a_tenant: Database, name: str
) -> None:
    with ledger_of_a_tenant.read() as conn:
        found = list(plans(conn, ASKS[name]))
    assert [line for line in found if OTHERS_TOO.match(line)] == []
    assert [line for line in found if line.startswith("USE TEMP B-TREE FOR ORDER BY") and "FROM sessions" in line] == []


@pytest.mark.parametrize("dialect", ["sqlite"])
@pytest.mark.parametrize("name", CHANGES)
def test_no_write_scans_a_table_that_grows(ledger_of_a_tenant: Database, name: str) -> None:
    with ledger_of_a_tenant.write() as conn:
        assert [line for line in plans(conn, CHANGES[name]) if A_SCAN.match(line)] == []


class Sent:
    """The statements that a block sends to PostgreSQL, with their parameters."""

    def __init__(self, conn: sa.Connection) -> None:
        self.statements: list[tuple[Any, Any]] = []
        self.driver = conn.connection.driver_connection
        assert isinstance(self.driver, psycopg.Connection)
        record = self.statements.append

        class Recording(psycopg.Cursor):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
                record((query, params))
                return super().execute(query, params, **options)

        class RecordingServer(psycopg.ServerCursor):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
                record((query, params))
                return super().execute(query, params, **options)

        self._factories = self.driver.cursor_factory, self.driver.server_cursor_factory
        self.driver.cursor_factory, self.driver.server_cursor_factory = Recording, RecordingServer

    def plans(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield each node of the statements' plans, with its statement."""
        self.driver.cursor_factory, self.driver.server_cursor_factory = self._factories
        for query, params in self.statements:
            text = query if isinstance(query, str) else query.decode()
            if re.match(r"(?i)\s*(select|with|insert|update|delete)\b", text):
                (found,) = self.driver.execute(f"EXPLAIN (FORMAT JSON) {text}", params).fetchone()
                yield from ((text, node) for node in _nodes(found[0]["Plan"]))


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def postgres_scans(database: Database, ask: Ask) -> list[str]:
    """Return the scans of whole growing tables that PostgreSQL makes although it avoids them where an index helps."""
    with database.write() as conn:
        conn.exec_driver_sql("SET LOCAL enable_seqscan = off")
        sent = Sent(conn)
        ask(conn)
        return [
            f"{node['Relation Name']} in {statement}"
            for statement, node in sent.plans()
            if node["Node Type"] == "Seq Scan" and re.fullmatch(GROWING, node["Relation Name"])
        ]


@pytest.mark.postgres
@pytest.mark.parametrize("dialect", ["postgresql"])
@pytest.mark.parametrize("name", [*ASKS, *CHANGES])
def test_postgresql_scans_no_table_that_grows(ledger_of_a_tenant: Database, name: str) -> None:
    assert postgres_scans(ledger_of_a_tenant, {**ASKS, **CHANGES}[name]) == []


@pytest.mark.postgres
@pytest.mark.parametrize("dialect", ["postgresql"])
def test_a_scan_of_a_growing_table_on_postgresql_is_found(ledger_of_a_tenant: Database) -> None:
    by_model = sa.text("SELECT turn_id FROM turns WHERE model = 'm'")
    assert postgres_scans(ledger_of_a_tenant, lambda conn: conn.execute(by_model)) != []
