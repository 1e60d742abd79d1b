"""Groups that are closed without their missing runs: nothing happens in them any more, or some runs have no reward."""

from __future__ import annotations

import datetime
from typing import Literal

import sqlalchemy as sa

from turnwise.store.groups import GroupChange, drop, ready
from turnwise.store.rows import to_micros
from turnwise.store.schema import groups, sessions
from turnwise.types import GroupStatus, SessionStatus


def stalled(
    inactive_since: datetime.datetime,
    policy: Literal["train", "drop"] = "train",
    now: datetime.datetime | None = None,
) -> GroupChange:
    """Close the open groups without activity since then: make them ready with their finished sessions, or drop them.

    With `train`, a group without a finished session stays open, because its rewards may still arrive.
    """
    since = to_micros(inactive_since)
    active = sa.exists().where(sessions.c.group_pk == groups.c.group_pk, sessions.c.last_active_at >= since)
    is_open = groups.c.status == GroupStatus.OPEN.value
    if policy == "drop":
        wanted = sa.and_(is_open, groups.c.last_active_at < since, ~active)
        return drop(wanted, "stalled", "dropped %d groups without activity for `stalled_seconds`")
    # Groups that agents gave up stay open without a finished session, and most open groups may be such ones. With
    # the sum the databases search by `num_finished`, not by `last_active_at`, and pass over them.
    wanted = sa.and_(is_open, groups.c.num_finished > 0, groups.c.last_active_at + 0 < since, ~active)
    done = "%d groups without activity for `stalled_seconds` are trained without their missing sessions"
    return GroupChange(wanted, ready("stalled", now), done)


def unrewarded(ended_before: datetime.datetime, now: datetime.datetime | None = None) -> GroupChange:
    """Make the open groups ready whose sessions all ended before then, one with a reward and others without."""
    is_awaited = sa.or_(sessions.c.status == SessionStatus.OPEN.value, sessions.c.ended_at >= to_micros(ended_before))
    # A count is taken group by group; NOT EXISTS would become a join that reads all sessions.
    num_awaited = sa.select(sa.func.count()).where(sessions.c.group_pk == groups.c.group_pk, is_awaited)
    wanted = sa.and_(
        groups.c.status == GroupStatus.OPEN.value,
        groups.c.num_finished > 0,
        groups.c.num_sessions >= groups.c.group_size,
        num_awaited.scalar_subquery() == 0,
    )
    done = "%d groups are trained without sessions that ended without a reward"
    return GroupChange(wanted, ready("unrewarded", now), done)
