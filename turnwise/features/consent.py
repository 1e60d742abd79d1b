"""Consent: which sessions are not trained, and which are not even recorded.

Each session has the answer in its own columns `train` and `record`, where trainers, exports and the writer of turns
read it. A mark of an end user, a key or a tenant changes the sessions that exist, and new ones when they are created.
A denial wins: no mark allows what another one denies, and a session that is marked stays so, because consent that is
given later is not consent to what was said before.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import sqlalchemy as sa

from turnwise.features.copies import SESSIONS_AT_ONCE, deepest_copies
from turnwise.store import groups
from turnwise.store.conversations import newest_generation
from turnwise.store.extensions import Extension, KeyName
from turnwise.store.rows import RowFormat, StoredRow
from turnwise.store.schema import columns_of, metadata, sessions, turns
from turnwise.store.schema import groups as groups_table
from turnwise.store.selection import LockedSession, SessionFilter, is_session, session_row
from turnwise.store.statements import fetch_rows, insert_ignoring, is_among, read_page, unindexed
from turnwise.store.trainer_reports import forget_in_states
from turnwise.store.turns import TurnRow
from turnwise.types import GroupStatus, Outcome, Session, SessionKey, utc_now

NOT_RECORDED = "not_recorded"
"""Reason of an untrainable turn of a session with `record` false: it has neither texts nor tokens."""
REDACTED = "redacted"
"""Reason of an untrainable turn that is stored without tokens, because its text or an ancestor's was redacted."""


class ConsentOf(enum.StrEnum):
    """What can be marked as not to be trained, beside a session."""

    USER = "user"
    KEY = "key"
    TENANT = "tenant"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ConsentMark:
    """The calls of an end user, a key or a tenant are not trained, as if each of its sessions had `train` false."""

    tenant: str = "default"
    kind: ConsentOf
    name: str = ""
    """The user's or the key's id; empty for the whole tenant."""
    record: bool = True
    """False: nothing of its calls is stored either."""
    written_by: str | None = None
    """The API key that wrote it; set by the proxy."""
    created_at: datetime.datetime = dataclasses.field(default_factory=utc_now)


consent_marks = sa.Table(
    "consent_marks",
    metadata,
    *columns_of(ConsentMark),
    sa.PrimaryKeyConstraint("tenant", "kind", "name"),
)
_MARKS = RowFormat(ConsentMark, consent_marks)
_NAME = "tenant", "kind", "name"
Restricted: TypeAlias = tuple[list[SessionKey], int]
"""Some sessions that were changed, none after the last, and the number to pass as `after` next time."""


def put_mark(conn: sa.Connection, mark: ConsentMark) -> None:
    """Store a mark, or make the one that there is stricter; `restrict_marked` then changes the sessions that exist."""
    if conn.dialect.name == "postgresql":  # after this no session is created by one who has read the marks before
        conn.execute(sa.text("LOCK TABLE consent_marks IN EXCLUSIVE MODE"))
    if not insert_ignoring(conn, consent_marks, _MARKS.row(mark)) and not mark.record:
        conn.execute(sa.update(consent_marks).where(*_is(mark)).values(record=0))


def lift_mark(conn: sa.Connection, mark: ConsentMark) -> None:
    """Remove a mark: sessions that are created from now on are trained again."""
    conn.execute(sa.delete(consent_marks).where(*_is(mark)))


def list_marks(
    conn: sa.Connection, tenant: str, *, limit: int, after: tuple[str, str] | None = None
) -> tuple[list[ConsentMark], bool]:
    """Return the marks of a tenant that follow those with this kind and name, and whether there are more."""
    found = sa.select(consent_marks).where(consent_marks.c.tenant == tenant)
    if after is not None:
        found = found.where(sa.tuple_(consent_marks.c.kind, consent_marks.c.name) > after)
    page, has_more = read_page(conn, found.order_by(consent_marks.c.kind, consent_marks.c.name), limit)
    return [_MARKS.record(row) for row in page], has_more


def count_marks(conn: sa.Connection, tenant: str | None) -> dict[str, int]:
    """Return the number of marks of each kind, and of sessions that are not trained."""
    kinds = sa.select(consent_marks.c.kind, sa.func.count()).group_by(consent_marks.c.kind)
    denied = sa.select(sa.literal("session"), sa.func.count()).select_from(sessions)
    denied = denied.where(*SessionFilter(tenant=tenant, train=False).clauses())
    if tenant is not None:
        kinds = kinds.where(consent_marks.c.tenant == tenant)
    return {kind: number for kind, number in (*conn.execute(kinds), *conn.execute(denied)) if number}


def _findings(conn: sa.Connection, tenant: str | None) -> Iterator[tuple[str, str]]:
    marks = count_marks(conn, tenant)
    named = ", ".join(f"{number} {kind}{'s' if number > 1 else ''}" for kind, number in marks.items())
    yield "consent", f"not trained: {named}" if named else "nothing is marked `train = false`"


def restricted(conn: sa.Connection, new: Sequence[Session]) -> list[Session]:
    """Return new sessions as they are stored: with what marks deny them, and what the sessions that they continue."""
    if not new:
        return []
    names = [name for session in new for name in _names(session)]
    keys = dict(zip(_NAME, map(list, zip(*names, strict=True)), strict=True))
    marks = fetch_rows(conn, consent_marks, (*_NAME, "record"), keys, lock=True)
    denied = {(tenant, kind, name): bool(record) for tenant, kind, name, record in marks}
    if before := [(each.tenant, each.continues) for each in new if each.continues is not None]:
        keys = {"tenant": [tenant for tenant, _ in before], "session_id": [continued for _, continued in before]}
        continued = fetch_rows(conn, sessions, ("tenant", "session_id", "train", "record"), keys)
        denied |= {(tenant, "", each): bool(record) for tenant, each, train, record in continued if not train}
    return [_least(session, [denied[name] for name in _names(session) if name in denied]) for session in new]


def _names(session: Session) -> list[tuple[str, str, str]]:
    """Return the marks that a session may have, and under "" the session that it continues."""
    named = {
        ConsentOf.USER: session.user_id,
        ConsentOf.KEY: session.key_id,
        ConsentOf.TENANT: "",
        "": session.continues,
    }
    return [(session.tenant, str(kind), name) for kind, name in named.items() if name is not None]


def _least(session: Session, records: Sequence[bool]) -> Session:
    record = session.record and all(records)
    train = session.train and record and not records
    return dataclasses.replace(session, train=train, record=record) if (train, record) != (True, True) else session


def restrict_marked(conn: sa.Connection, mark: ConsentMark, after: int = 0) -> Restricted:
    """Mark some of the sessions that a mark is of, with what derives from them. Call it until it returns none."""
    column = {ConsentOf.USER: sessions.c.user_id, ConsentOf.KEY: sessions.c.key_id}.get(mark.kind)
    own = [sessions.c.tenant == mark.tenant, *([] if column is None else [column == mark.name])]
    return _restrict(conn, own, mark.record, after)


def restrict_session(
    conn: sa.Connection, tenant: str, session_id: str, prefix: str, record: bool, after: int = 0
) -> Restricted:
    """Mark a session, `PREFIX2` and so on that continue it, and what derives from them, as `restrict_marked`.

    Raises:
        NotFound: there is no such session.
    """
    session_row(conn, tenant, session_id, lock=True)
    newest = newest_generation(conn, tenant, prefix)
    names = [session_id, *(f"{prefix}{number}" for number in range(2, newest + 1))]
    own = [sessions.c.tenant == tenant, is_among(conn.dialect, sessions.c.session_id, names)]
    return _restrict(conn, own, record, after, key=sessions.c.session_pk + 0)  # searched by names, not in key order


def denied_since(conn: sa.Connection, read: Collection[SessionKey]) -> set[SessionKey]:
    """Return those of some sessions that were marked as not to be trained, or deleted, after they were read."""
    stored = sa.select(sessions.c.tenant, sessions.c.session_id).where(
        is_among(conn.dialect, sessions.c.tenant, {tenant for tenant, _ in read}),
        is_among(conn.dialect, sessions.c.session_id, {session_id for _, session_id in read}),
        sessions.c.train == 1,
    )
    return {*read} - {(row.tenant, row.session_id) for row in conn.execute(stored)}


def restrict_changed(conn: sa.Connection, session: Session) -> None:
    """Mark a session that got another end user as marks deny it, with what derives from it."""
    (marked,) = restricted(conn, [session])
    own = is_session(session.tenant, session.session_id)
    while not marked.train and _restrict(conn, own, marked.record, 0)[0]:
        pass


def inherit(conn: sa.Connection, session: SessionKey, source_ids: Collection[str]) -> None:
    sources = sessions.c.tenant == session[0], is_among(conn.dialect, sessions.c.session_id, source_ids)
    denied = sa.select(sa.func.min(sessions.c.record)).where(*sources, sessions.c.train == 0)
    if (record := conn.execute(denied).scalar_one()) is not None:
        _mark(conn, [session_row(conn, *session, lock=True)], record=bool(record))


def _restrict(
    conn: sa.Connection,
    wanted: Sequence[sa.ColumnElement[bool]],
    record: bool,
    after: int,
    *,
    key: sa.ColumnElement[int] = sessions.c.session_pk,
) -> Restricted:
    """Mark copies before the sessions that they are of, as a deletion goes: what is marked has no copy that is not."""
    due = sessions.c.train == 1 if record else sessions.c.record == 1
    some = sa.select(sessions).where(*wanted, due, key > after).order_by(key)
    found = conn.execute(some.limit(SESSIONS_AT_ONCE).with_for_update()).all()
    deepest = deepest_copies(conn, found, due, with_forks=True)
    _mark(conn, deepest, record=record)
    last = found[-1].session_pk if found and deepest is found else after
    return [(row.tenant, row.session_id) for row in deepest], last


def _mark(conn: sa.Connection, found: Sequence[StoredRow], *, record: bool) -> None:
    """Mark sessions; drop the groups, unless a trainer holds them, in which no session is left to train."""
    if not found:
        return
    changed = sa.update(sessions).where(
        is_among(conn.dialect, sessions.c.session_pk, [row.session_pk for row in found])
    )
    conn.execute(changed.values(train=0, **({} if record else {"record": 0})))
    _drop_untrainable(conn, {row.group_pk for row in found} - {None})
    forget_in_states(conn, [(row.tenant, row.session_id) for row in found], [])


def _is(mark: ConsentMark) -> list[sa.ColumnElement[bool]]:
    c = consent_marks.c
    return [c.tenant == mark.tenant, c.kind == mark.kind.value, c.name == mark.name]


def _drop_untrainable(conn: sa.Connection, group_pks: Collection[int]) -> None:
    """Drop the complete groups of these that no trainer holds, and in which no session is left to train."""
    of_part = (turns.c.session_pk == sessions.c.session_pk, turns.c.policy_id == groups_table.c.policy_id)
    sampled = sa.exists().where(*of_part).correlate(sessions, groups_table)
    is_complete = groups_table.c.num_sessions >= groups_table.c.group_size
    for key, is_due, is_own in (
        (groups_table.c.group_pk, is_complete, sa.true()),
        (groups_table.c.part_of, sa.true(), sampled),
    ):
        is_left = sa.exists().where(sessions.c.group_pk == key, sessions.c.train == 1, is_own)
        wanted = sa.and_(
            is_among(conn.dialect, key, group_pks),
            unindexed(groups_table.c.status).in_([GroupStatus.OPEN.value, GroupStatus.READY.value]),  # most may be open
            is_due,
            ~is_left,
        )
        groups.drop(wanted, "no_consent", "dropped %d groups without a session that may be trained").make(conn)


def _marks_of_keys(conn: sa.Connection, keys: Sequence[KeyName]) -> Mapping[KeyName, Mapping[str, Any]]:
    """Return what marks say of keys, as fields of `turnwise.store.keys.Key`, without those that have none."""
    tenants, names = ([*column] for column in zip(*keys, strict=True))
    of = {"tenant": tenants, "kind": [ConsentOf.KEY.value] * len(names), "name": names}
    found = fetch_rows(conn, consent_marks, ("tenant", "name", "record"), of)
    return {(tenant, name): {"train": False, "record": bool(record)} for tenant, name, record in found}


_NO_TOKENS: TurnRow = {
    **dict.fromkeys(
        ("prompt_delta", "token_ids", "logprobs", "history_digest", "messages_digest", "dialogue_digest", "parts"), b""
    ),
    **dict.fromkeys(("request_key", "request_digest")),
    "prompt_length": 0,
}
_NO_TEXTS: TurnRow = {"messages": "[]", "tools": None, "sampling": "{}", "response": "{}", "parent_turn_id": None}


def without_tokens(row: TurnRow, reason: str, *, with_texts: bool = True) -> TurnRow:
    """Remove the tokens of a turn's row, and what tells of its text: nothing can be trained of it or extend it.

    The digests of a text of which all but a telephone number is known would tell the number, and a retry would get the
    reply as it is stored.
    """
    row |= _NO_TOKENS if with_texts else _NO_TOKENS | _NO_TEXTS
    if row["outcome"] not in (Outcome.ABORTED.value, Outcome.ERROR.value):
        row |= {"outcome": Outcome.UNTRAINABLE.value, "reason": reason}
    return row


def _withhold(
    batch: Sequence[TurnRow], locked: Mapping[SessionKey, LockedSession], num_tokens: Mapping[str, int]
) -> None:
    """Remove what may not be stored of turns: also of those that extend one which is stored without tokens."""
    withheld = {turn_id for turn_id, number in num_tokens.items() if not number}
    for row in batch:
        if not locked[row["tenant"], row["session_id"]].record:
            without_tokens(row, NOT_RECORDED, with_texts=False)
        elif row["parent_turn_id"] in withheld:
            without_tokens(row, REDACTED)
        if not row["prompt_length"] and not row["token_ids"]:
            withheld.add(row["turn_id"])


EXTENSION = Extension(
    before_append=_withhold,
    tables_of_tenants=(consent_marks,),
    opened=restricted,
    after_change=restrict_changed,
    after_copy=inherit,
    of_keys=_marks_of_keys,
    findings=_findings,
)
