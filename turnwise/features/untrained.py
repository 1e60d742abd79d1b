"""How calls are sampled of late: the sampling parameters of some turns, so that people learn which are not trained."""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence

import sqlalchemy as sa

from turnwise.chains import TRAINABLE_OUTCOMES
from turnwise.parts import sizes_of
from turnwise.sampling import Sampled
from turnwise.store.rows import to_micros
from turnwise.store.schema import sessions, turns
from turnwise.store.selection import is_session
from turnwise.store.statements import beginning_of_parts, is_among
from turnwise.types import TRAINED_ROLES, Split, utc_now

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
        turns.c.outcome.in_([outcome.value for outcome in TRAINABLE_OUTCOMES]),
        sa.or_(turns.c.role.is_(None), turns.c.role.in_([role.value for role in TRAINED_ROLES])),
    )
    of_sessions = is_among(conn.dialect, turns.c.session_pk, pks)
    found = sa.select(turns.c.sampling, beginning_of_parts()).where(of_sessions, *fit, *wanted)
    newest = conn.execute(found.order_by(turns.c.session_pk.desc(), turns.c.seq.desc()).limit(SAMPLED_TURNS))
    return [(json.loads(text), sizes_of(parts)) for text, parts in newest]
