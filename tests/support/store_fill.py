"""A store with one small tenant, `t`, and as many groups of others as a test wants."""

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, make_turn, update_record

from turnwise.features import feedback, labels
from turnwise.features.labels import Label
from turnwise.store import claims, keys, rows, schema, sessions, turns
from turnwise.store.database import Database
from turnwise.store.statements import insert_rows
from turnwise.types import (
    GroupStatus,
    PolicyVersion,
    Reward,
    Session,
    SessionStatus,
    Split,
    Turn,
)

OTHERS = ("other-0", "other-1", "other-2", "other-3", "other-4")
FIRST_PKS = (1_000_000, 2_000_000)
"""Of the groups and sessions of other tenants, and of more of the small one."""


class OneTransaction:
    def __init__(self, conn: sa.Connection) -> None:
        self._conn = conn

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        yield self._conn

    read = write

    def truncate_log(self) -> None:
        """Leave the log, which holds the open transaction."""


def claim(conn: sa.Connection, **fields: Any) -> claims.Claim:
    held = claims.claim(opened(conn), "trainer", max_groups=4, lease_seconds=60, **fields)
    assert held is not None
    return held


def opened(conn: sa.Connection) -> Database:
    return cast("Database", OneTransaction(conn))


def acknowledge(conn: sa.Connection, update_id: int, session_id: str) -> None:
    """Record an update that trained one session of the claimed groups, and dropped the others."""
    held = claim(conn)
    refused = {group.key: "refused" for group in held.groups if group.group_id != session_id}
    update = update_record(update_id, trainer_id="trainer")
    policy = PolicyVersion(version=update_id, path="a-model", update_id=update_id)
    claims.ack(conn, claims.Finished(held, update, policy, refused, {("t", session_id): {f"t-{session_id}-t1": 0.5}}))


def fill(database: Database) -> None:
    add_session(database, "s", tenant="t", turns=2)
    add_finished(database, "done", tenant="t")
    with database.write() as conn:
        acknowledge(conn, 1, "done")
    add_finished(database, "over", tenant="t")
    add_session(database, "member", tenant="t", group_id="g")
    add_session(database, "unrewarded", tenant="t")
    add_finished(database, "held-out", tenant="t", split=Split.EVAL)
    with database.write() as conn:
        turns.append_turns(conn, [inferred_turn("t8")])
        sessions.end_session(conn, "t", "unrewarded")
        labels.set_label(conn, "t", "over", Label(label="golden"))
        keys.create_key(conn, "t", keys.KeyRole.AGENT, "a key")


def inferred_turn(turn_id: str) -> Turn:
    """Return a turn of a call without a session's name, and with a request key."""
    return make_turn(
        turn_id,
        session_id="s",
        tenant="t",
        request_key="key",
        inferred_by="k",
        history_digest=b"d",
        dialogue_digest=b"d",
        policy_version_last=1,
    )


def fill_more(database: Database, num_groups: int, tenants: Sequence[str] = OTHERS) -> None:
    packed: dict[sa.Table, list[dict[str, Any]]] = {
        table: []
        for table in (
            schema.groups,
            schema.sessions,
            schema.turns,
            schema.rewards,
            feedback.feedback,
            schema.trained_sessions,
            labels.session_labels,
            schema.idempotency,
        )
    }
    for number in range(num_groups):
        place, at = divmod(number, len(tenants))
        for table, row in _more_rows(tenants[at], place, FIRST_PKS[tenants[at] == "t"] + number):
            packed[table].append(row)
    with database.write() as conn:
        for table, batch in packed.items():
            insert_rows(conn, table, batch)


def _more_rows(tenant: str, place: int, pk: int) -> Iterator[tuple[sa.Table, dict[str, Any]]]:
    statuses = (GroupStatus.OPEN, GroupStatus.TRAINED, GroupStatus.DROPPED)
    status = statuses[place % 3]
    is_open = status is GroupStatus.OPEN
    group_id = f"g-{place}"
    yield (
        schema.groups,
        {
            "group_pk": pk,
            "tenant": tenant,
            "group_id": group_id,
            "group_size": 2,
            "status": status.value,
            "num_sessions": 1,
            "num_finished": 0 if is_open else 1,
            "policy_id": 0,
            "last_active_at": 0,
            "fencing_token": 1,
            "update_id": None if is_open else 1,
        },
    )
    session = Session(session_id=f"s-{group_id}", tenant=tenant, task_id="x", group_id=group_id)
    ended = {} if is_open else {"status": SessionStatus.ENDED.value}
    yield (
        schema.sessions,
        {**rows.session_row(session, pk), "session_pk": pk, "num_turns": 2, "num_rewards": 1, **ended},
    )
    for seq in range(2):
        turn = make_turn(f"t{seq}", seq=seq, step=seq, inferred_by=f"key-of-{tenant}", history_digest=b"d")
        turn = dataclasses.replace(turn, turn_id=f"{tenant}-{group_id}-{seq}", dialogue_digest=b"d")
        yield schema.turns, rows.turn_row(turn, pk)
    yield schema.rewards, rows.reward_row(Reward(session_id="", value=1.0), pk)
    content = {"turn_id": "", "kind": "boolean", "name": "feedback", "content": "{}", "created_at": 0}
    yield feedback.feedback, {"session_pk": pk, "group_id": None, "source": None, "written_by": None, **content}
    trained_in = {"session_pk": pk, "update_id": 1, "policy_version": 1, "advantages": "{}"}
    yield schema.trained_sessions, trained_in
    yield labels.session_labels, labels.LABELS.row(Label(label="golden"), session_pk=pk, tenant=tenant)
    request = {"tenant": tenant, "session_id": group_id, "key": group_id}
    answer = {**request, "body_digest": b"", "answer": "[]", "created_at": 0}
    yield schema.idempotency, answer
