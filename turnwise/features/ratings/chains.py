"""The chains of sessions of which some have no rating, as a head sees them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import sqlalchemy as sa

from turnwise.chains import Experience
from turnwise.store.experiences import Shape, stream
from turnwise.store.schema import sessions
from turnwise.store.statements import is_among
from turnwise.types import Role


def chains_of(conn: sa.Connection, pks: Sequence[int], policy_id: int, roles: Collection[Role]) -> list[Experience]:
    """Return the chains of sessions, with or without a reward, oldest session first."""
    shape = Shape(roles=roles, merge="chain", with_unrewarded=True, with_files=True, policy_id=policy_id)
    return list(stream(conn, [is_among(conn.dialect, sessions.c.session_pk, pks)], shape))
