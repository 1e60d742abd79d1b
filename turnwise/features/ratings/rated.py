"""What is known of a policy's single sessions: those with a rating, each with the probability of being asked, and not.

This is what trains: the order is that of the store, so that a trainer that starts again reads the same.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence

import sqlalchemy as sa

from turnwise import credit
from turnwise.features.ratings.draws import OVER, USABLE, Draw, draws_of, inclusion, rating_draws, versions_of
from turnwise.features.ratings.predictions import predicted_rewards
from turnwise.store import rows
from turnwise.store.rewards import rewards_of
from turnwise.store.schema import sessions
from turnwise.store.statements import is_among
from turnwise.types import MAX_REWARD, Credit, SessionKey, Split

MOST_READ = 10_000
"""Sessions of a policy that are read, the newest that ended and that expired."""
AT_ONCE = 500
SCORES = "scores"
"""The key of a session's metadata that has the scores of judges, by name."""


class RatingSource(enum.StrEnum):
    """How a session came to its rating."""

    ASKED = "asked"
    """A person was asked about it, with a known probability."""
    VOLUNTEERED = "volunteered"
    """A user's own thumb, or a program's reward: it has no probability."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RatedSession:
    """A single session of a policy that is over, with a rating or without one."""

    session_pk: int
    tenant: str
    session_id: str
    policy_version: int
    """The newest version of the policy that sampled in it."""
    ended_at: datetime.datetime
    rating: float | None = None
    """The reward that it has; None without a rating."""
    source: RatingSource | None = None
    probability: float | None = None
    """The probability that the draws so far have asked about it; None for one that was not asked."""
    rated_at: datetime.datetime | None = None
    """When it was rated; None for one that was not asked."""
    predicted: float | None = None
    deviation: float | None = None
    """The head's prediction and its standard deviation, of a rated session as it was before the rating."""
    scores: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What judges say of it, by name: they tell the head and are no rewards."""

    @property
    def key(self) -> SessionKey:
        return self.tenant, self.session_id


def is_asked(conn: sa.Connection, policy_id: int) -> bool:
    """Return whether anybody was asked about a session of the policy."""
    some = sa.select(rating_draws.c.draw_id).where(rating_draws.c.policy_id == policy_id).limit(1)
    return conn.execute(some).first() is not None


def sessions_of(
    conn: sa.Connection, policy_id: int, tenant: str | None = None, *, most: int = MOST_READ
) -> list[RatedSession]:
    """Return the newest single sessions of a policy that are over and may be trained, oldest first."""
    c = sessions.c
    of = [c.policy_id == policy_id, *([] if tenant is None else [c.tenant == tenant])]
    # The index `ix_sessions_live` has the rows with the first two conditions.
    is_single = c.group_id.is_(None), c.ended_at.is_not(None), c.split == Split.TRAIN.value
    found: list[rows.StoredRow] = []
    for status in OVER:
        over = sa.select(sessions).where(c.status == status, *is_single, *USABLE, *of)
        found += conn.execute(over.order_by(c.last_active_at.desc()).limit(most)).all()
    found = sorted(found, key=lambda row: row.session_pk)
    by_tenant: dict[str, list[Draw]] = defaultdict(list)
    for draw in draws_of(conn, policy_id, tenant):
        by_tenant[draw.tenant].append(draw)
    asked = {(draw.tenant, draw.session_id): draw for draws in by_tenant.values() for draw in draws}
    known: list[RatedSession] = []
    for at in range(0, len(found), AT_ONCE):
        known += _known(conn, found[at : at + AT_ONCE], policy_id, asked, by_tenant)
    return known


def _known(
    conn: sa.Connection,
    found: Sequence[rows.StoredRow],
    policy_id: int,
    asked: dict[tuple[str, str | None], Draw],
    by_tenant: dict[str, list[Draw]],
) -> list[RatedSession]:
    pks = [row.session_pk for row in found]
    lines = rewards_of(conn, [row.session_pk for row in found if row.num_rewards])
    versions = versions_of(conn, pks, policy_id)
    of_these = sa.select(predicted_rewards).where(is_among(conn.dialect, predicted_rewards.c.session_pk, pks))
    predicted = {row.session_pk: row for row in conn.execute(of_these)}
    known = []
    for row in found:
        if row.session_pk not in versions:
            continue
        created_at, ended_at = rows.from_micros(row.created_at), rows.from_micros(row.ended_at)
        draw, guess = asked.get((row.tenant, row.session_id)), predicted.get(row.session_pk)
        reward = credit.session_reward(lines.get(row.session_pk, []), Credit(row.credit))
        was_asked = draw is not None and draw.rated_at is not None and reward is not None
        source = RatingSource.ASKED if was_asked else RatingSource.VOLUNTEERED if reward is not None else None
        known.append(
            RatedSession(
                session_pk=row.session_pk,
                tenant=row.tenant,
                session_id=row.session_id,
                policy_version=versions[row.session_pk],
                ended_at=ended_at,
                rating=reward,
                source=source,
                probability=inclusion(by_tenant[row.tenant], created_at, ended_at) if was_asked else None,
                rated_at=draw.rated_at if was_asked and draw is not None else None,
                predicted=None if guess is None else guess.mean,
                deviation=None if guess is None else guess.deviation,
                scores=_scores(row.metadata),
            )
        )
    return known


def _scores(metadata: str) -> dict[str, float]:
    found = json.loads(metadata).get(SCORES) if f'"{SCORES}"' in metadata else None
    if not isinstance(found, dict):
        return {}
    numbers = {name: value for name, value in found.items() if type(value) in {int, float}}
    return {name: float(value) for name, value in numbers.items() if abs(value) <= MAX_REWARD}
