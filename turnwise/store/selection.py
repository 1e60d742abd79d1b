"""Which sessions a reader or a writer wants: by a filter, by their ids, or by a turn of theirs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import sqlalchemy as sa

from turnwise.errors import InvalidRequest, NotFound
from turnwise.store import extensions, rows
from turnwise.store.schema import DELETED, policies, sessions, turns
from turnwise.store.statements import fetch_rows, read_page, size_of
from turnwise.types import DEFAULT_POLICY, Session, SessionKey, SessionStatus, Split

_EQUAL = frozenset(sessions.c.keys()) - {"metadata", "train"}
"""Columns that equal the filter's field of this name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SessionFilter:
    """Conditions on a session, all of which must hold; None means no condition."""

    tenant: str | None = None
    session_id: str | None = None
    task_id: str | None = None
    group_id: str | None = None
    """A group's id. It does not match a session without `group_id`, whose group has the session id."""
    split: Split | None = None
    status: SessionStatus | None = None
    user_id: str | None = None
    train: bool | None = None
    label: str | None = None
    policy: str | None = None
    """A policy that may sample in it: its own, or another one that has."""
    policy_id: int | None = None
    """Its own policy."""
    metadata: str | None = None
    """`KEY=VALUE`: the session's metadata have this value, which is JSON or else a text, at this key."""

    def clauses(self) -> list[sa.ColumnElement[bool]]:
        wanted = [
            sessions.c[field.name] == getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in _EQUAL and getattr(self, field.name) is not None
        ]
        if self.train is not None:
            # As a literal, because the index of marked sessions serves only that.
            wanted.append(sessions.c.train == sa.literal_column(str(int(self.train))))
        if not self.tenant and self.status is None:
            wanted.append(sessions.c.status != DELETED)
        if self.policy is not None:
            wanted.append(extensions.condition("policy", self.policy, self.tenant))
        if self.metadata is not None:
            wanted.append(_has_metadata(self.metadata))
        if self.label is not None:
            wanted.append(extensions.condition("label", self.label, self.tenant))
        return wanted


def has_policy(is_wanted: Callable[[sa.Column[Any]], sa.ColumnElement[bool]]) -> sa.ColumnElement[bool]:
    """Return the condition that a session's own policy is wanted, or another one that has sampled in it."""
    sampled = turns.c.session_pk == sessions.c.session_pk, is_wanted(turns.c.policy_id)
    return sa.or_(is_wanted(sessions.c.policy_id), sa.exists().where(*sampled))


def is_shown_to(tenant: str, policy_id: sa.Column[int]) -> sa.ColumnElement[bool]:
    """Return the condition that a tenant may read what is of a policy: of the default one, or of its own."""
    own = sa.select(policies.c.policy_id).where(policies.c.tenant == tenant)
    return sa.or_(policy_id == DEFAULT_POLICY, policy_id.in_(own))


def is_session(tenant: str, session_id: str) -> tuple[sa.ColumnElement[bool], sa.ColumnElement[bool]]:
    return sessions.c.tenant == tenant, sessions.c.session_id == session_id


def _has_metadata(condition: str) -> sa.ColumnElement[bool]:
    key, sign, text = condition.partition("=")
    if not key or not sign:
        raise InvalidRequest(f"a metadata filter is KEY=VALUE, not {condition!r}", param="metadata")
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    pair = rows.dump({key: value})[1:-1]
    # Not LIKE: SQLite's ignores the case of ASCII letters.
    return sa.or_(*(sa.func.replace(sessions.c.metadata, pair + end, "") != sessions.c.metadata for end in ",}"))


def session_row(conn: sa.Connection, tenant: str, session_id: str, *, lock: bool = False) -> rows.StoredRow:
    """Return a session's row, which may be locked until the transaction ends."""
    found = sa.select(sessions).where(*is_session(tenant, session_id))
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
    record: int
    """0: nothing of its turns' texts and tokens may be stored."""


def lock_sessions(conn: sa.Connection, wanted: Collection[SessionKey]) -> list[LockedSession]:
    """Lock these sessions in a fixed order, so that two writers cannot deadlock; this is the hot path."""
    names = {"tenant": [tenant for tenant, _ in wanted], "session_id": [session_id for _, session_id in wanted]}
    found = itertools.starmap(LockedSession, fetch_rows(conn, sessions, LockedSession._fields, names, lock=True))
    locked = [row for row in found if (row.tenant, row.session_id) in wanted]
    if len(locked) < len(wanted):
        missing = min(set(wanted) - {(row.tenant, row.session_id) for row in locked})
        raise _no_session(missing[1])
    return locked


def _no_session(session_id: str) -> NotFound:
    return NotFound(f"there is no session {session_id!r}", param="session_id")


def session_rows(
    conn: sa.Connection, wanted: SessionFilter, *, limit: int, after: str | None, max_bytes: int | None = None
) -> tuple[list[rows.StoredRow], bool]:
    """Return the rows that `sessions` makes its page of, and whether there are more."""
    clauses = wanted.clauses()
    held = sessions.c
    if after is not None:
        if wanted.tenant is None:
            raise ValueError("paging behind a session needs the filter's tenant")
        clauses.append(held.session_pk < session_row(conn, wanted.tenant, after).session_pk)
    newest = sa.select(sessions).where(*clauses).order_by(held.session_pk.desc())
    size = size_of(conn.dialect, held.metadata, held.sampling)
    return read_page(conn, newest, limit, size=size, max_bytes=max_bytes)


def sessions_of_turns(conn: sa.Connection, tenant: str, turn_ids: Collection[str]) -> dict[str, str]:
    if not turn_ids:
        return {}
    of_session = "(SELECT {} FROM sessions WHERE sessions.session_pk = turns.session_pk)"
    columns = "turn_id", of_session.format("session_id"), of_session.format("tenant")
    found = fetch_rows(conn, turns, columns, {"turn_id": list(turn_ids)})
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


def takes(version: int, share: float, session: Session) -> bool:
    """Return whether a share of the sessions, drawn for a version by their ids, has this one."""
    digest = blake2b(f"{version} {session.tenant} {session.session_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
