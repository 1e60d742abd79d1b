"""Updates: the sessions and turns that each one trained, with their advantages, and what of sessions was trained."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.store import rows
from turnwise.store.schema import policies as policies_table
from turnwise.store.schema import sessions, trained_sessions, turns
from turnwise.store.schema import updates as table
from turnwise.store.selection import is_shown_to
from turnwise.store.statements import insert_rows, is_among
from turnwise.types import DEFAULT_POLICY, SessionKey, TrainedIn, UpdateRecord

Advantages = Mapping[str, float]
Updates: TypeAlias = Sequence[tuple[TrainedIn, Mapping[str, float]]]


def record_trained(conn: sa.Connection, update: UpdateRecord, trained: Mapping[SessionKey, Advantages]) -> str | None:
    """Store the turns that an update trained, with their advantages; return their digest, None without turns."""
    if not trained:
        return None
    pks, of_sessions = session_pks(conn, trained), session_digests(conn, trained)
    insert_rows(
        conn,
        trained_sessions,
        [
            {
                "update_id": update.update_id,
                "session_pk": pks[key],
                "policy_version": update.policy_version,
                "advantages": rows.dump(dict(advantages)),
                "digest": of_sessions[key],
            }
            for key, advantages in trained.items()
            if key in pks  # an imported session, which is not claimed, may have been deleted meanwhile
        ],
    )
    return rows.batch_digest(of_sessions)


def session_pks(conn: sa.Connection, keys: Collection[SessionKey]) -> dict[SessionKey, int]:
    """Return the numbers of those of some sessions that are stored."""
    found = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.tenant, sessions.c.session_id).where(
            is_among(conn.dialect, sessions.c.tenant, {tenant for tenant, _ in keys}),
            is_among(conn.dialect, sessions.c.session_id, {session_id for _, session_id in keys}),
        )
    )
    return {key: row.session_pk for row in found if (key := (row.tenant, row.session_id)) in keys}


def session_digests(conn: sa.Connection, trained: Mapping[SessionKey, Advantages]) -> dict[SessionKey, bytes | None]:
    """Return the digest of what an update trains of each session."""
    of_turns = turn_digests(conn, {turn_id for advantages in trained.values() for turn_id in advantages})
    return {key: rows.session_digest(advantages, of_turns) for key, advantages in trained.items()}


def updates_after(conn: sa.Connection, update_id: int, policy_id: int | None = DEFAULT_POLICY) -> list[UpdateRecord]:
    found = sa.select(table).where(table.c.update_id > update_id).order_by(table.c.update_id)
    if policy_id is not None:
        found = found.where(table.c.policy_id == policy_id)
    return [rows.UPDATES.record(row) for row in conn.execute(found)]


def last_update(conn: sa.Connection, policy_id: int | None = None, *, tenant: str | None = None) -> UpdateRecord | None:
    """Return the newest update, of a policy or of those that a tenant may read."""
    newest = sa.select(table).order_by(table.c.update_id.desc()).limit(1)
    if policy_id is not None:
        newest = newest.where(table.c.policy_id == policy_id)
    if tenant is not None:
        newest = newest.where(is_shown_to(tenant, table.c.policy_id))
    row = conn.execute(newest).first()
    return None if row is None else rows.UPDATES.record(row)


def last_update_id(conn: sa.Connection) -> int:
    """Return the highest id of an update, also of one that trained sessions alone name.

    Before 0.2 sessions could come from another database, without its updates.
    """
    stored, of_sessions = sa.func.max(table.c.update_id), sa.func.max(trained_sessions.c.update_id)
    found = conn.execute(sa.select(sa.select(stored).scalar_subquery(), sa.select(of_sessions).scalar_subquery())).one()
    return max(number or 0 for number in found)


def check_lineage(conn: sa.Connection, versions: Collection[int], policy_id: int = DEFAULT_POLICY) -> None:
    """Check that a policy's newest update made one of these versions: those that a trainer's weights come from.

    Until the transaction ends, which must be one of `Database.write`, no other one checks the same policy.

    Raises:
        Conflict: Another trainer trains the same policy.
    """
    of_policy = policies_table.c.policy_id == policy_id
    conn.execute(sa.select(policies_table.c.policy_id).where(of_policy).with_for_update())
    last = last_update(conn, policy_id)
    if last is not None and last.policy_version not in versions:
        raise Conflict(
            f"trainer {last.trainer_id!r} recorded update {last.update_id} with policy version {last.policy_version}, "
            "which the weights of this trainer do not come from: two trainers train one policy. One trainer at a time "
            "may train the policies of a database: stop this one, or the other one"
        )


def turn_digests(conn: sa.Connection, turn_ids: set[str]) -> dict[str, bytes | None]:
    found = conn.execute(
        sa.select(turns.c.turn_id, turns.c.digest).where(is_among(conn.dialect, turns.c.turn_id, turn_ids))
    )
    return {row.turn_id: row.digest for row in found}


def trained_in(conn: sa.Connection, session_pks: Sequence[int]) -> Mapping[int, Updates]:
    """Return the updates that trained these sessions, oldest first, with the advantages of their turns."""
    found = conn.execute(
        sa.select(trained_sessions)
        .where(is_among(conn.dialect, trained_sessions.c.session_pk, session_pks))
        .order_by(trained_sessions.c.session_pk, trained_sessions.c.update_id)
    )
    return rows.by_key(
        found,
        "session_pk",
        lambda row: (TrainedIn(update_id=row.update_id, policy_version=row.policy_version), json.loads(row.advantages)),
    )


def last_updates(conn: sa.Connection, tenant: str, session_ids: Sequence[str]) -> dict[str, int]:
    found = conn.execute(
        sa.select(sessions.c.session_id, sa.func.max(trained_sessions.c.update_id))
        .join_from(sessions, trained_sessions)
        .where(sessions.c.tenant == tenant, is_among(conn.dialect, sessions.c.session_id, set(session_ids)))
        .group_by(sessions.c.session_id)
    )
    return {session_id: update_id for session_id, update_id in found}  # noqa: C416  a Row is a tuple, but not to mypy
