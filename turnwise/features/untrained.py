"""What is not trained of late: how some turns were sampled, and how many tokens of the newest sessions were trained."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from turnwise.chains import TRAINABLE_OUTCOMES
from turnwise.parts import sizes_of
from turnwise.sampling import Sampled, left_out_by
from turnwise.store.rows import StoredRow, to_micros
from turnwise.store.schema import HAS_TRAINABLE_OUTCOME, groups, policies, sessions, turns
from turnwise.store.selection import is_session
from turnwise.store.statements import beginning_of_parts, is_among, size_of
from turnwise.store.updates import trained_in
from turnwise.types import TOKEN_BYTES, TRAINED_ROLES, GroupStatus, Split, utc_now

COUNTED_SESSIONS, COUNTED_TURNS = 200, 2000
SAMPLED_SESSIONS, SAMPLED_TURNS = 50, 500
"""Sessions and turns that are read to say how calls are sampled: the newest, and again as many over the last hour."""
SAMPLED_AMONG, SAMPLED_FOR = 2000, datetime.timedelta(hours=1)
"""The sessions of which some are read, evenly: the newest, as far as they are so young. An agent that samples greedily
is found beside a busy one, whose sessions alone are the newest ones."""
SAMPLED_BEGINNING = 4
"""Turns that are read of each of those."""


def newest_samplings(conn: sa.Connection, tenant: str | None, session_id: str | None = None) -> list[Sampled]:
    """Return the sampling parameters of turns whose outcome and role let a trainer train them.

    Args:
        conn: The connection.
        tenant: Whose turns; None: everybody's.
        session_id: The newest turns of this session; None: those of the newest sessions of split `train`, and the first
            ones of some others of the last hour.
    """
    held = sessions.c
    found = sa.select(held.session_pk, held.created_at, held.split).order_by(held.session_pk.desc())
    if tenant is None:
        found = found.where(held.session_pk > sa.select(sa.func.max(held.session_pk)).scalar_subquery() - SAMPLED_AMONG)
    elif session_id is None:
        found = found.where(held.tenant == tenant)
    else:
        found = found.where(*is_session(tenant, session_id))
    among = [row for row in conn.execute(found.limit(SAMPLED_AMONG)) if row.split == Split.TRAIN.value]
    since = to_micros(utc_now() - SAMPLED_FOR)
    newest = [row.session_pk for row in among[:SAMPLED_SESSIONS]]
    others = [row.session_pk for row in among[SAMPLED_SESSIONS:] if row.created_at >= since]
    some = others[:: max(1, -(-len(others) // SAMPLED_SESSIONS))]
    return _samplings(conn, newest) + _samplings(conn, some, turns.c.seq < SAMPLED_BEGINNING)


def _samplings(conn: sa.Connection, pks: Sequence[int], *wanted: sa.ColumnElement[bool]) -> list[Sampled]:
    """Return those of the newest trainable turns of some sessions."""
    if not pks:
        return []
    fit = (
        HAS_TRAINABLE_OUTCOME,
        sa.or_(turns.c.role.is_(None), turns.c.role.in_([role.value for role in TRAINED_ROLES])),
    )
    of_sessions = is_among(conn.dialect, turns.c.session_pk, pks)
    found = sa.select(turns.c.sampling, beginning_of_parts()).where(of_sessions, *fit, *wanted)
    newest = conn.execute(found.order_by(turns.c.session_pk.desc(), turns.c.seq.desc()).limit(SAMPLED_TURNS))
    return [(json.loads(text), sizes_of(parts)) for text, parts in newest]


@dataclasses.dataclass(frozen=True, slots=True)
class TrainedShare:
    """How many tokens of some newest sessions were trained: those of one `agent`, `key` or `policy`."""

    tenant: str
    by: str
    name: str
    num_sampled: int
    num_trained: int
    left_out: Mapping[str, int]
    """The tokens of the turns that were not trained, by reason."""


def trained_shares(conn: sa.Connection, tenant: str | None = None) -> list[TrainedShare]:
    """Return what was trained of the newest sessions whose group is trained or dropped; with a tenant, of its own."""
    held, t, g = sessions.c, turns.c, groups.c
    own = held.tenant == tenant if tenant is not None else held.session_pk > 0  # read backwards by an index
    s = sa.select(sessions).where(own).order_by(held.session_pk.desc()).limit(COUNTED_SESSIONS).subquery().c
    size = (size_of(conn.dialect, t.token_ids) // TOKEN_BYTES).label("size")
    names = s.tenant, s.agent, s.key_id.label("key"), policies.c.name.label("policy")
    found = conn.execute(
        sa.select(t.turn_id, t.session_pk, t.outcome, t.reason, t.role, t.sampling, size, *names)
        .add_columns(beginning_of_parts().label("parts"), g.reason.label("refusal"))
        .join_from(turns, s.session_pk.table, t.session_pk == s.session_pk)
        .join(groups, sa.and_(g.policy_id == t.policy_id, sa.or_(g.group_pk == s.group_pk, g.part_of == s.group_pk)))
        .join(policies, policies.c.policy_id == g.policy_id)
        .where(g.status.in_([GroupStatus.TRAINED.value, GroupStatus.DROPPED.value]))
        .order_by(t.session_pk.desc(), t.seq.desc())
        .limit(COUNTED_TURNS)
    ).all()
    updates = trained_in(conn, [*{row.session_pk for row in found}]).values()
    trained = {turn_id for each in updates for _, advantages in each for turn_id in advantages}
    counts: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for row in found:
        reason = GroupStatus.TRAINED if row.turn_id in trained else _why_not(row)
        for by in ("agent", "key", "policy"):
            counts[row.tenant, by, getattr(row, by) or "unknown"][reason] += row.size
    return [
        TrainedShare(*place, of.total(), of.pop(GroupStatus.TRAINED, 0), dict(of.most_common()))
        for place, of in sorted(counts.items())
    ]


def _why_not(turn: StoredRow) -> str:
    if turn.outcome not in TRAINABLE_OUTCOMES:
        return str(turn.reason or turn.outcome)
    if turn.role is not None and turn.role not in TRAINED_ROLES:
        return str(turn.role)
    own = left_out_by(json.loads(turn.sampling), sizes_of(turn.parts))
    return own or str(turn.refusal or "not_chosen").partition(":")[0]
