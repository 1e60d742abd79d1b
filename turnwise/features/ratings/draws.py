"""Which session a person is asked about: one of those that are over and not rated, each with the same probability.

Sessions since the served version come first, because what a policy no longer does teaches it little.

A draw is kept with its probability, so that what the asked say of a version can be weighted to what all would say. It
is handed to one rater for a time. One that was not rated in that time is handed to the next rater before another is
drawn: who leaves does not change who is asked. Thumbs that users give by themselves take no session out of the draw,
because people rate what annoys them; the rating that was asked for replaces them.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import random
from collections.abc import Sequence

import sqlalchemy as sa

from turnwise.errors import Conflict
from turnwise.features import feedback
from turnwise.features.copies import FORKED, session_copies
from turnwise.store import rows
from turnwise.store.database import clock
from turnwise.store.experiences import MAY_BE_TRAINED
from turnwise.store.schema import Serial, columns_of, index, metadata, sessions, turns
from turnwise.store.selection import session_row
from turnwise.store.serving import serving_state
from turnwise.store.statements import insert_new_rows, is_among, unindexed
from turnwise.types import IMPORT, SessionStatus, Split, utc_now

PER_VERSION = 10
"""Ratings that come between two versions of a policy that is trained on few ratings."""
LEASE_SECONDS = 600
DAYS = 30
"""Sessions that are older are not drawn."""
OVER = (SessionStatus.ENDED.value, SessionStatus.EXPIRED.value)
USABLE = (
    sessions.c.opened_by.is_distinct_from(IMPORT),
    MAY_BE_TRAINED,
    sessions.c.record == 1,
    sessions.c.num_turns > 0,
)
"""What a session must be that is rated or judged by ratings."""
MAX_PAIRS = 20


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A session that a person was asked about."""

    draw_id: int
    session_id: str | None = None
    """None after its deletion: the draw stays, because the others' probabilities depend on it."""
    tenant: str
    policy_id: int
    policy_version: int
    """The newest version of the policy that sampled in it."""
    num_candidates: int
    """Sessions that this draw could have taken; all had the same probability."""
    since: datetime.datetime
    """It could take none that was created before."""
    rater: str
    """Who has it, as the rater's program names itself."""
    asked_at: datetime.datetime
    leased_until: datetime.datetime | None
    """Until then no other rater gets it; None where this rater has put it back."""
    rated_at: datetime.datetime | None = None
    rating: float | None = None
    """The reward that the rating was worth."""
    written_by: str | None = None
    """The API key that rated; set by the proxy."""

    @property
    def probability(self) -> float:
        """The probability of this session at this draw."""
        return 1 / self.num_candidates


rating_draws = sa.Table(
    "rating_draws",
    metadata,
    sa.Column("draw_id", Serial, primary_key=True, autoincrement=True),
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk", ondelete="SET NULL")),
    *columns_of(Draw, omit=frozenset({"draw_id", "session_id"})),
    index("ix_rating_draws_session", "session_pk", unique=True),
    index("ix_rating_draws_policy", "policy_id", "tenant", "draw_id"),
)
_ROWS = rows.RowFormat(Draw, rating_draws, joined=("draw_id", "session_id"), free_text=("rater",))
_JOINED = sa.select(rating_draws, sessions.c.session_id).select_from(rating_draws.outerjoin(sessions))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two replies to the same prompt: one of the session, and one of a session that was forked before it."""

    turn_id: str
    other_turn_id: str
    other_session_id: str


def next_draw(
    conn: sa.Connection,
    tenant: str,
    policy_id: int,
    rater: str,
    *,
    lease_seconds: float = LEASE_SECONDS,
    days: float = DAYS,
    drawn: random.Random | None = None,
    now: datetime.datetime | None = None,
) -> Draw | None:
    """Return the draw that this rater has, one that another rater has left, or a new one; None if none is left to rate.

    It is the rater's for `lease_seconds`. A rater who asks again gets the same draw.
    """
    if conn.dialect.name == "postgresql":  # two raters at once would draw the same session
        conn.execute(sa.text("LOCK TABLE rating_draws IN EXCLUSIVE MODE"))
    instant = clock(conn, now)
    until = instant + int(lease_seconds * 1e6)
    draw_id = _waiting(conn, tenant, policy_id, rater, instant)
    if draw_id is None:
        draw_id = _draw(conn, tenant, policy_id, rater, instant, until, days, drawn or random.SystemRandom())
    else:
        handed = sa.update(rating_draws).where(rating_draws.c.draw_id == draw_id)
        conn.execute(handed.values(rater=rater, leased_until=until))
    return None if draw_id is None else _read(conn, draw_id)


def _waiting(conn: sa.Connection, tenant: str, policy_id: int, rater: str, instant: int) -> int | None:
    """Return the oldest draw that is not rated and that this rater may have, the rater's own first."""
    c = rating_draws.c
    own = sa.and_(c.rater == rater, c.leased_until.is_not(None))
    left = sa.and_(c.rater != rater, sa.func.coalesce(c.leased_until, 0) <= instant)
    waits = c.policy_id == policy_id, c.tenant == tenant, c.rated_at.is_(None), c.session_pk.is_not(None)
    may = sa.select(c.draw_id).join(sessions).where(*waits, sa.or_(own, left), MAY_BE_TRAINED, sessions.c.record == 1)
    return conn.execute(may.order_by(sa.case((own, 0), else_=1), c.draw_id).limit(1)).scalar_one_or_none()


def _draw(
    conn: sa.Connection,
    tenant: str,
    policy_id: int,
    rater: str,
    instant: int,
    until: int,
    days: float,
    drawn: random.Random,
) -> int | None:
    oldest, num = instant - int(days * 86_400e6), 0
    active = serving_state(conn, policy_id).active
    for since in (oldest if active is None else max(oldest, rows.to_micros(active.created_at)), oldest):
        candidates = _candidates(tenant, policy_id, since)
        if num := conn.execute(candidates.with_only_columns(sa.func.count())).scalar_one():
            break
    else:
        return None
    at = drawn.randrange(num)
    session_pk = conn.execute(candidates.order_by(sessions.c.session_pk).offset(at).limit(1)).scalar_one()
    row = {
        "session_pk": session_pk,
        "tenant": tenant,
        "policy_id": policy_id,
        "policy_version": versions_of(conn, [session_pk], policy_id).get(session_pk, 0),
        "num_candidates": num,
        "since": since,
        "rater": rater,
        "asked_at": instant,
        "leased_until": until,
    }
    ((draw_id,),) = insert_new_rows(conn, rating_draws, [row], "draw_id")
    return int(draw_id)


def versions_of(conn: sa.Connection, session_pks: Sequence[int], policy_id: int) -> dict[int, int]:
    """Return the newest version of the policy that sampled in each session, if one did."""
    c = turns.c
    own = is_among(conn.dialect, c.session_pk, session_pks), c.policy_id == policy_id, c.reason.is_distinct_from(FORKED)
    newest = sa.select(c.session_pk, sa.func.max(c.policy_version_last)).where(*own).group_by(c.session_pk)
    return {pk: version for pk, version in conn.execute(newest) if version is not None}


def _candidates(tenant: str, policy_id: int, since: int) -> sa.Select[int]:
    """Select the single sessions that a draw may take: each is over, may be trained, and has no reward but thumbs."""
    c = sessions.c
    # Searched by its tenant, and not by its time among the sessions of all tenants.
    is_over = c.tenant == tenant, c.status.in_(OVER), c.ended_at + 0 > 0, c.created_at + 0 >= since
    is_single = c.group_id.is_(None), unindexed(c.split) == Split.TRAIN.value, c.policy_id == policy_id
    said = sa.exists().where(
        feedback.feedback.c.session_pk == c.session_pk, feedback.feedback.c.kind.in_(list(feedback.RATINGS))
    )
    is_new = ~sa.exists().where(rating_draws.c.session_pk == c.session_pk)
    return sa.select(c.session_pk).where(*is_over, *is_single, *USABLE, sa.or_(c.num_rewards == 0, said), is_new)


def missing(num_rated: int) -> int:
    """Return how many ratings are missing until a policy's next version."""
    return PER_VERSION - num_rated % PER_VERSION


def _read(conn: sa.Connection, draw_id: int) -> Draw:
    return _ROWS.record(conn.execute(_JOINED.where(rating_draws.c.draw_id == draw_id)).one())


def draw_of(conn: sa.Connection, tenant: str, session_id: str, *, lock: bool = False) -> Draw:
    """Return the draw of a session.

    Raises:
        Conflict: the session was not drawn.
    """
    session_pk = session_row(conn, tenant, session_id, lock=lock).session_pk
    found = conn.execute(_JOINED.where(rating_draws.c.session_pk == session_pk)).one_or_none()
    if found is None:
        raise Conflict(
            f"nobody was asked about session {session_id!r}: `GET /v1/ratings/next` draws the session to rate. Post "
            "what is said without being asked to `/v1/feedback`",
            param="session_id",
        )
    return _ROWS.record(found)


def rate(
    conn: sa.Connection,
    tenant: str,
    session_id: str,
    reward: float,
    given: feedback.Feedback | None = None,
    *,
    written_by: str | None = None,
    retrain: bool = False,
) -> Draw:
    """Store the rating of a drawn session and the reward that it is worth; a later one replaces it.

    `given` is the rating as feedback; without it the session has the reward already. The same rating again writes
    nothing.

    Raises:
        Conflict: the session was not drawn.
    """
    draw = draw_of(conn, tenant, session_id, lock=True)
    if draw.rated_at is not None and draw.rating == reward:
        return draw
    if given is not None:
        feedback.add(conn, given, reward=reward, retrain=retrain)
    values = {"rating": reward, "rated_at": rows.to_micros(utc_now()), "written_by": written_by}
    conn.execute(sa.update(rating_draws).where(rating_draws.c.draw_id == draw.draw_id).values(**values))
    return _read(conn, draw.draw_id)


def put_back(conn: sa.Connection, tenant: str, session_id: str) -> Draw:
    """Hand a draw that its rater cannot rate to another rater; the rater who had it does not get it again.

    Raises:
        Conflict: the session was not drawn.
    """
    draw = draw_of(conn, tenant, session_id, lock=True)
    c = rating_draws.c
    waits = c.draw_id == draw.draw_id, c.rated_at.is_(None)
    conn.execute(sa.update(rating_draws).where(*waits).values(leased_until=None))
    return _read(conn, draw.draw_id)


def draws_of(conn: sa.Connection, policy_id: int, tenant: str | None = None) -> list[Draw]:
    """Return the draws of a policy's sessions in order, those of all tenants or of one."""
    c = rating_draws.c
    of = [c.policy_id == policy_id, *([] if tenant is None else [c.tenant == tenant])]
    return [_ROWS.record(row) for row in conn.execute(_JOINED.where(*of).order_by(c.draw_id))]


def inclusion(draws: Sequence[Draw], created_at: datetime.datetime, ended_at: datetime.datetime | None) -> float | None:
    """Return the probability that a tenant's draws of a policy take a session with these instants; None before it ends.

    1 − Π (1 − 1 / candidates) over the draws that could take it, its own and later ones among them: as for a sample
    without replacement, 4 of 40 give 0.1 each.
    """
    if ended_at is None:
        return None
    missed = 1.0
    for draw in draws:
        if draw.since <= created_at and ended_at <= draw.asked_at:
            missed *= 1 - draw.probability
    return 1 - missed


def pair_of(conn: sa.Connection, tenant: str, session_id: str) -> Pair | None:
    """Return two replies to the same prompt, of this session and of one that was forked from it; None without any."""
    c, copied = turns.c, session_copies.c
    from_it = copied.tenant == tenant, copied.source_id == session_id, copied.made_by == FORKED
    found = conn.execute(
        sa.select(sessions.c.session_pk, sessions.c.session_id, sessions.c.metadata)
        .join_from(session_copies, sessions)
        .where(*from_it, MAY_BE_TRAINED)
        .order_by(sessions.c.session_pk.desc())
        .limit(MAX_PAIRS)
    ).all()
    for fork in found:
        forked_at = (json.loads(fork.metadata).get("forked_from") or {}).get("turn_id")
        own = c.session_pk == fork.session_pk, c.reason.is_distinct_from(FORKED)
        other = conn.execute(sa.select(c.turn_id, c.prompt_delta).where(*own).order_by(c.seq).limit(1)).one_or_none()
        first = conn.execute(sa.select(c.turn_id, c.prompt_delta).where(c.turn_id == forked_at)).one_or_none()
        if other is not None and first is not None and other.prompt_delta == first.prompt_delta:
            return Pair(turn_id=first.turn_id, other_turn_id=other.turn_id, other_session_id=fork.session_id)
    return None


def forget(conn: sa.Connection, session_pks: Sequence[int]) -> None:
    """Keep of the draws of deleted sessions only how many candidates they had."""
    deleted = is_among(conn.dialect, rating_draws.c.session_pk, session_pks)
    nothing: dict[str, object] = dict.fromkeys(("session_pk", "leased_until", "rated_at", "rating", "written_by"))
    conn.execute(sa.update(rating_draws).where(deleted).values(**nothing, rater=""))
