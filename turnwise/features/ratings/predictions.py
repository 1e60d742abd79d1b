"""What a policy's head predicts of sessions; one row a session, the newest.

A session that was rated keeps the first prediction, of a head that did not know its rating: that one alone says what
the head is worth.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Iterable

import sqlalchemy as sa

from turnwise.features.ratings.draws import rating_draws
from turnwise.store import rows
from turnwise.store.schema import columns_of, index, metadata, sessions
from turnwise.store.statements import insert_rows, is_among
from turnwise.types import SessionKey, utc_now


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a head says of a session whose rating it does not know."""

    tenant: str
    session_id: str
    policy_id: int
    policy_version: int
    """The newest version of the policy that sampled in it."""
    mean: float
    """The probability of a good rating."""
    deviation: float
    """Its standard deviation."""
    made_at: datetime.datetime = dataclasses.field(default_factory=utc_now)


predicted_rewards = sa.Table(
    "predicted_rewards",
    metadata,
    # The cascade removes them also where the session's row alone is deleted.
    sa.Column(
        "session_pk",
        sa.ForeignKey("sessions.session_pk", ondelete="CASCADE"),
        primary_key=True,
        autoincrement=False,
    ),
    *columns_of(Prediction, omit=frozenset({"tenant", "session_id"})),
    index("ix_predicted_rewards_policy", "policy_id", "policy_version"),
)
_ROWS = rows.RowFormat(Prediction, predicted_rewards, joined=("tenant", "session_id"))
JOINED = sa.select(predicted_rewards, sessions.c.tenant, sessions.c.session_id).join_from(predicted_rewards, sessions)


def keep(conn: sa.Connection, made: Iterable[Prediction]) -> int:
    """Store predictions in place of earlier ones, but for sessions that were rated since these; return how many."""
    by_key = {(one.tenant, one.session_id): one for one in made}
    pks = _pks(conn, by_key)
    of_these = is_among(conn.dialect, rating_draws.c.session_pk, list(pks.values()))
    rated = sa.select(rating_draws.c.session_pk).where(of_these, rating_draws.c.rated_at.is_not(None))
    predicted = rated.join(predicted_rewards, predicted_rewards.c.session_pk == rating_draws.c.session_pk)
    known = set(conn.execute(predicted).scalars())
    new = {key: pk for key, pk in pks.items() if pk not in known}
    of_new = is_among(conn.dialect, predicted_rewards.c.session_pk, list(new.values()))
    conn.execute(sa.delete(predicted_rewards).where(of_new))
    insert_rows(conn, predicted_rewards, [_ROWS.row(by_key[key], session_pk=pk) for key, pk in new.items()])
    return len(new)


def _pks(conn: sa.Connection, keys: Iterable[SessionKey]) -> dict[SessionKey, int]:
    found: dict[SessionKey, int] = {}
    by_tenant: dict[str, list[str]] = {}
    for tenant, session_id in keys:
        by_tenant.setdefault(tenant, []).append(session_id)
    c = sessions.c
    for tenant, ids in by_tenant.items():
        own = sa.select(c.session_id, c.session_pk).where(c.tenant == tenant, is_among(conn.dialect, c.session_id, ids))
        found |= {(tenant, session_id): pk for session_id, pk in conn.execute(own)}
    return found


def predictions_of(conn: sa.Connection, policy_id: int, tenant: str | None = None) -> list[Prediction]:
    """Return the predictions of a policy's sessions, of all tenants or of one, oldest session first."""
    of = [predicted_rewards.c.policy_id == policy_id, *([] if tenant is None else [sessions.c.tenant == tenant])]
    found = JOINED.where(*of).order_by(predicted_rewards.c.session_pk)
    return [_ROWS.record(row) for row in conn.execute(found)]
