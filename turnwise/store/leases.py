"""Named locks between processes, with a time limit and a fencing token, also when a clock jumps."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

import sqlalchemy as sa

from turnwise.errors import LeaseLost
from turnwise.store.database import clock
from turnwise.store.schema import leases
from turnwise.store.statements import insert_ignoring

T = TypeVar("T")


def acquire_lease(
    conn: sa.Connection, name: str, owner: str, seconds: float, now: datetime.datetime | None = None
) -> int | None:
    """Acquire a named lock between processes for some seconds; all processes must use the same number.

    A lease with more than twice that time left was granted before the clock was set back; it is ignored.

    Returns:
        The fencing token, which increases by one with every change of holder; None while another process holds the
        lease. The current holder gets the same token and a longer lease.
    """
    instant = clock(conn, now)
    expires_at = instant + int(seconds * 1e6)
    lease = leases
    first = {"name": name, "owner": owner, "fencing_token": 1, "expires_at": expires_at}
    if insert_ignoring(conn, lease, first):
        return 1
    keeps = sa.and_(lease.c.owner == owner, lease.c.expires_at > instant)
    void = lease.c.expires_at > instant + int(2 * seconds * 1e6)
    return conn.execute(
        sa.update(lease)
        .where(lease.c.name == name, sa.or_(keeps, lease.c.expires_at <= instant, void))
        .values(
            owner=owner,
            expires_at=expires_at,
            fencing_token=lease.c.fencing_token + sa.case((keeps, 0), else_=1),
        )
        .returning(lease.c.fencing_token)
    ).scalar_one_or_none()


def renew_lease(
    conn: sa.Connection, name: str, fencing_token: int, seconds: float, now: datetime.datetime | None = None
) -> bool:
    """Extend the lease, or with 0 seconds release it; return False if another process has acquired it."""
    lease = leases
    held = lease.c.name == name, lease.c.fencing_token == fencing_token
    expires_at = clock(conn, now) + int(seconds * 1e6)
    return conn.execute(sa.update(lease).where(*held).values(expires_at=expires_at)).rowcount == 1


def under_lease(
    conn: sa.Connection, name: str, fencing_token: int, seconds: float, change: Callable[..., T], *arguments: Any
) -> T:
    """Make a change and extend the lease, in one transaction.

    Raises:
        LeaseLost: another process has acquired the lease; nothing is changed.
    """
    if not renew_lease(conn, name, fencing_token, seconds):
        raise LeaseLost(f"another process has taken over the lease {name!r}; this one follows it now")
    return change(conn, *arguments)
