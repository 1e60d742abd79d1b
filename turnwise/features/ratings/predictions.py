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
from turnwise.store.schema import columns_of, index, metadata, of_session
from turnwise.store.statements import insert_rows, is_among
from turnwise.store.updates import session_pks
from turnwise.types import utc_now


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
    of_session(),
    *columns_of(Prediction, omit=frozenset({"tenant", "session_id"})),
    index("ix_predicted_rewards_policy", "policy_id", "policy_version"),
)
_ROWS = rows.RowFormat(Prediction, predicted_rewards, joined=("tenant", "session_id"))


def keep(conn: sa.Connection, made: Iterable[Prediction]) -> int:
    """Store predictions in place of earlier ones, but for sessions that were rated since these; return how many."""
    by_key = {(one.tenant, one.session_id): one for one in made}
    pks = session_pks(conn, by_key.keys())
    of_these = is_among(conn.dialect, rating_draws.c.session_pk, list(pks.values()))
    rated = sa.select(rating_draws.c.session_pk).where(of_these, rating_draws.c.rated_at.is_not(None))
    predicted = rated.join(predicted_rewards, predicted_rewards.c.session_pk == rating_draws.c.session_pk)
    known = set(conn.execute(predicted).scalars())
    new = {key: pk for key, pk in pks.items() if pk not in known}
    of_new = is_among(conn.dialect, predicted_rewards.c.session_pk, list(new.values()))
    conn.execute(sa.delete(predicted_rewards).where(of_new))
    insert_rows(conn, predicted_rewards, [_ROWS.row(by_key[key], session_pk=pk) for key, pk in new.items()])
    return len(new)
