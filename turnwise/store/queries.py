"""Queries of the API, the dashboard, retries and the trainer.

Derived values are not stored. A session's reward, a turn's whole prompt and every experience are computed from the
ledger on every read, so late rewards and a changed credit policy take effect immediately.
"""

from __future__ import annotations

import dataclasses
import datetime
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import sqlalchemy as sa

from turnwise import credit
from turnwise.errors import NotFound
from turnwise.store import lineage, pages, policies, rows, tables, trained
from turnwise.store.lineage import TurnView
from turnwise.store.rows import to_micros
from turnwise.store.session_filter import SessionFilter, is_session
from turnwise.store.statements import fetch_rows, size_of
from turnwise.store.trainer_status import TrainerStatus, trainer_statuses
from turnwise.types import Credit, GroupStatus, Reward, Session, SessionKey, Turn, utc_now

RECENTLY = datetime.timedelta(hours=1)
"""How far back failed calls are counted."""
MOST_UNFINISHED = 10_000
"""Of the unfinished groups that are counted in each state."""


@dataclasses.dataclass(frozen=True, slots=True)
class Counts:
    """Counts of the rows of the store, or of one tenant."""

    sessions: dict[str, int]
    """By status."""
    groups: dict[str, int]
    """By status: `ready` groups wait for the trainer, `claimed` groups are being trained."""
    num_turns: int
    num_rewards: int
    num_failed_calls: int
    """Calls of the last hour that ended with an error."""
    num_updates: int
    """Updates of the tenant's own policies and of the default one."""
    trainers: list[TrainerStatus]
    """The last reports of the trainers of those policies, newest first."""


def session(conn: sa.Connection, tenant: str, session_id: str) -> Session:
    """Return a session with its reward.

    Raises:
        NotFound: no such session.
    """
    return session_with_rewards(conn, tenant, session_id)[0]


def session_with_rewards(conn: sa.Connection, tenant: str, session_id: str) -> tuple[Session, list[Reward]]:
    """Return a session, and the reward lines for all of it in order of arrival, without those of its steps and turns.

    Raises:
        NotFound: no such session.
    """
    ((found, lines, _),) = sessions_with_lines(conn, [session_row(conn, tenant, session_id)])
    return found, [line for line in lines if credit.is_for_session(line)]


def session_row(conn: sa.Connection, tenant: str, session_id: str, *, lock: bool = False) -> rows.StoredRow:
    """Return a session's row, which may be locked until the transaction ends.

    Raises:
        NotFound: no such session.
    """
    found = sa.select(tables.sessions).where(*is_session(tenant, session_id))
    row = conn.execute(found.with_for_update() if lock else found).one_or_none()
    if row is None:
        raise _no_session(session_id)
    return row


class LockedSession(NamedTuple):
    """The columns of a session's row that a writer needs."""

    session_pk: int
    tenant: str
    session_id: str
    status: str
    num_turns: int
    num_rewards: int
    group_pk: int | None
    created_at: int


def lock_sessions(conn: sa.Connection, wanted: Collection[SessionKey]) -> list[LockedSession]:
    """Lock these sessions in a fixed order, so that two writers cannot deadlock; this is the hot path.

    Raises:
        NotFound: one of them is not stored.
    """
    names = {"tenant": [tenant for tenant, _ in wanted], "session_id": [session_id for _, session_id in wanted]}
    found = itertools.starmap(LockedSession, fetch_rows(conn, tables.sessions, LockedSession._fields, names, lock=True))
    locked = [row for row in found if (row.tenant, row.session_id) in wanted]
    if len(locked) < len(wanted):
        missing = min(set(wanted) - {(row.tenant, row.session_id) for row in locked})
        raise _no_session(missing[1])
    return locked


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"there is no session {session_id!r}", param="session_id")


def sessions(
    conn: sa.Connection,
    wanted: SessionFilter,
    *,
    limit: int = 100,
    after: str | None = None,
    max_bytes: int | None = None,
) -> tuple[list[Session], bool]:
    """Return the sessions that follow the session `after`, newest first, and whether there are more.

    Args:
        conn: A transaction.
        wanted: Which sessions.
        limit: Maximum number of sessions.
        after: The last session of the page before; None for the first page.
        max_bytes: Size at which the page ends before its limit; None for any size.

    Raises:
        NotFound: no session `after`.
    """
    page, has_more = session_rows(conn, wanted, limit=limit, after=after, max_bytes=max_bytes)
    return sessions_from_rows(conn, page), has_more


def session_rows(
    conn: sa.Connection, wanted: SessionFilter, *, limit: int, after: str | None, max_bytes: int | None = None
) -> tuple[list[rows.StoredRow], bool]:
    """Return the rows that `sessions` makes its page of, and whether there are more.

    Raises:
        NotFound: no session `after`.
    """
    clauses = wanted.clauses()
    held = tables.sessions.c
    if after is not None:
        if wanted.tenant is None:
            raise ValueError("paging behind a session needs the filter's tenant")
        clauses.append(held.session_pk < session_row(conn, wanted.tenant, after).session_pk)
    newest = sa.select(tables.sessions).where(*clauses).order_by(held.session_pk.desc())
    size = size_of(conn.dialect, held.metadata, held.sampling)
    return pages.read(conn, newest, limit, size=size, max_bytes=max_bytes)


def turn(conn: sa.Connection, tenant: str, turn_id: str, *, whole_prompt: bool = True) -> TurnView:
    """Return a turn with its rewards, and with its whole prompt or the part that it adds to its parent's prompt.

    Raises:
        NotFound: no such turn.
    """
    session_pk, seq = lineage.place_of_turn(conn, turn_id, tenant)
    return _views(conn, session_pk, seq, seq + 1, whole_prompt=whole_prompt)[0]


def turns(
    conn: sa.Connection,
    tenant: str,
    session_id: str,
    *,
    limit: int | None = 100,
    after: str | None = None,
    whole_prompt: bool = True,
    max_bytes: int | None = None,
) -> tuple[list[TurnView], bool]:
    """Return a session's turns in order, and whether there are more.

    Args:
        conn: A transaction.
        tenant: The session's tenant.
        session_id: The session.
        limit: Maximum number of turns; None means all.
        after: Return only turns after this one.
        whole_prompt: Whether each turn has its whole prompt, or the part that it adds to its parent's prompt.
        max_bytes: Size at which the page ends before its limit; None for any size.

    Raises:
        NotFound: no such session, or no turn `after` in it.
    """
    held = session_row(conn, tenant, session_id)
    first = 0 if after is None else 1 + _seq_of(conn, held.session_pk, after)
    end = held.num_turns if limit is None else min(first + limit, held.num_turns)
    if max_bytes is not None:
        sizes = lineage.sizes_between(conn, held.session_pk, first, end, whole_prompt=whole_prompt)
        end = first + pages.num_fitting(sizes, end - first, max_bytes)
    return _views(conn, held.session_pk, first, end, whole_prompt=whole_prompt), end < held.num_turns


def _views(conn: sa.Connection, session_pk: int, first: int, end: int, *, whole_prompt: bool) -> list[TurnView]:
    """Return a session's turns with `first` ≤ `seq` < `end`, with their rewards and the updates that trained them."""
    seq = tables.turns.c.seq
    found = lineage.session_turns(conn, session_pk, seq >= first, seq < end, with_ancestors=whole_prompt)
    lines = lineage.rewards_of(conn, [session_pk])[session_pk]
    updates_of = trained.trained_in(conn, [session_pk])[session_pk]
    return lineage.turn_views(found, lines, updates_of, first=first, whole_prompt=whole_prompt)


def sessions_of_turns(conn: sa.Connection, tenant: str, turn_ids: Collection[str]) -> dict[str, str]:
    """Return the session id of each of these turns that this tenant has."""
    if not turn_ids:
        return {}
    of_session = "(SELECT {} FROM sessions WHERE sessions.session_pk = turns.session_pk)"
    columns = "turn_id", of_session.format("session_id"), of_session.format("tenant")
    found = fetch_rows(conn, tables.turns, columns, {"turn_id": list(turn_ids)})
    return {turn_id: session_id for turn_id, session_id, holder in found if holder == tenant}


def session_of_turn(conn: sa.Connection, tenant: str, turn_id: str, session_id: str | None = None) -> str:
    """Return the id of the session that a turn is in.

    Raises:
        NotFound: this tenant has no such turn, or the session that is named has not.
    """
    return holder(sessions_of_turns(conn, tenant, [turn_id]), turn_id, session_id)


def holder(found: Mapping[str, str], turn_id: str, session_id: str | None = None) -> str:
    """Return the session of a turn from what `sessions_of_turns` has found.

    Raises:
        NotFound: it has not found the turn, or found it in another session than the one that is named.
    """
    held_by = found.get(turn_id)
    if held_by is None or (session_id and session_id != held_by):
        where = f" in session {session_id!r}" if session_id else ""
        raise NotFound(f"there is no turn {turn_id!r}{where}", param="turn_id")
    return held_by


def stored_turn(
    conn: sa.Connection, tenant: str, session_id: str, *, turn_id: str | None = None, request_key: str | None = None
) -> Turn | None:
    """Return the session's turn with this id, or of an earlier call with this key; None if there is none."""
    names = {tables.turns.c.turn_id: turn_id, tables.turns.c.request_key: request_key}
    row = conn.execute(
        lineage.SELECT_TURNS.where(
            *is_session(tenant, session_id),
            sa.or_(*(column == name for column, name in names.items() if name is not None)),
        )
        .order_by(tables.turns.c.seq)
        .limit(1)
    ).one_or_none()
    return None if row is None else rows.TURNS.record(row)


def unfinished_groups(conn: sa.Connection) -> dict[str, int]:
    """Count the open, ready and claimed groups of all tenants, at most `MOST_UNFINISHED` of each.

    Groups that agents gave up stay open until they are pruned, so there may be any number of them.
    """
    status = tables.groups.c.status
    unfinished = [GroupStatus.OPEN.value, GroupStatus.READY.value, GroupStatus.CLAIMED.value]
    some = [sa.select(status).where(status == value).limit(MOST_UNFINISHED).subquery() for value in unfinished]
    counted = [sa.select(sa.func.count()).select_from(each).scalar_subquery() for each in some]
    return dict(zip(unfinished, conn.execute(sa.select(*counted)).one(), strict=True))


def counts(conn: sa.Connection, tenant: str | None = None) -> Counts:
    """Count the rows of the store, or of one tenant, with the updates of its policies and of the default one."""
    held, failed = tables.sessions.c, tables.turns.c
    of_tenant = [] if tenant is None else [held.tenant == tenant]
    is_shown = [] if tenant is None else [policies.is_shown_to(tenant, tables.updates.c.policy_id)]
    sums = sa.select(*(sa.func.coalesce(sa.func.sum(column), 0) for column in (held.num_turns, held.num_rewards)))
    num_turns, num_rewards = conn.execute(sums.where(*of_tenant)).one()
    num_failed = sa.select(sa.func.count()).join_from(tables.turns, tables.sessions).where(*of_tenant)
    # The index of failed calls serves only a query with its literal condition.
    is_failed = failed.outcome == sa.literal_column("'error'"), failed.created_at >= to_micros(utc_now() - RECENTLY)
    num_updates = sa.select(sa.func.count()).select_from(tables.updates).where(*is_shown)
    return Counts(
        sessions=_by_status(conn, tables.sessions, tenant),
        groups=_by_status(conn, tables.groups, tenant),
        num_turns=int(num_turns),
        num_rewards=int(num_rewards),
        num_failed_calls=conn.execute(num_failed.where(*is_failed)).scalar_one(),
        num_updates=conn.execute(num_updates).scalar_one(),
        trainers=trainer_statuses(conn, tenant),
    )


def _by_status(conn: sa.Connection, table: sa.Table, tenant: str | None) -> dict[str, int]:
    is_counted = table.c.tenant != tables.NO_TENANT if tenant is None else table.c.tenant == tenant
    counted = sa.select(table.c.status, sa.func.count().label("number")).where(is_counted).group_by(table.c.status)
    return {row.status: row.number for row in conn.execute(counted)}


def sessions_from_rows(conn: sa.Connection, found: Sequence[rows.StoredRow]) -> list[Session]:
    return [session for session, _, _ in sessions_with_lines(conn, found)]


def sessions_with_lines(
    conn: sa.Connection, found: Sequence[rows.StoredRow]
) -> Iterator[tuple[Session, list[Reward], lineage.Updates]]:
    """Yield these sessions, each with its reward lines and the updates that trained it."""
    labels = lineage.labels_of(conn, [row.session_pk for row in found])
    lines = lineage.rewards_of(conn, [row.session_pk for row in found if row.num_rewards > 0])
    updates_of = trained.trained_in(conn, [row.session_pk for row in found if row.group_pk is not None])
    for row in found:
        own, updates = lines.get(row.session_pk, []), updates_of.get(row.session_pk, ())
        session = rows.SESSIONS.record(
            row,
            reward=credit.session_reward(own, Credit(row.credit)),
            trained_in=tuple(update for update, _ in updates),
            labels=labels.get(row.session_pk, ()),
        )
        yield session, own, updates


def _seq_of(conn: sa.Connection, session_pk: int, turn_id: str) -> int:
    seq = conn.execute(
        sa.select(tables.turns.c.seq).where(tables.turns.c.session_pk == session_pk, tables.turns.c.turn_id == turn_id)
    ).scalar_one_or_none()
    if seq is None:
        raise NotFound(f"there is no turn {turn_id!r} in this session", param="after")
    return int(seq)
