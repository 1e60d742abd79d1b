"""What a version changes, from sessions that older versions sampled: which ones count, and what is said of them.

A session counts if it is over, has a reward and trained nothing: it was kept from training, is of split `eval`, or
still waits for the trainer. One that trained the version would overrate it several times. Dropped groups do not count
either: a group with equal rewards is dropped for its rewards.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence

import sqlalchemy as sa

from turnwise.chains import Experience
from turnwise.features.statistics import off_policy
from turnwise.features.statistics.confidence import Looks
from turnwise.features.statistics.off_policy import MIN_EFFECTIVE, MIN_SESSIONS, change
from turnwise.store import extensions
from turnwise.store.experiences import MAY_BE_TRAINED, Shape, stream
from turnwise.store.groups import GroupChange, drop
from turnwise.store.schema import HAS_TRAINABLE_OUTCOME, groups, sessions, trained_sessions, turns, updates
from turnwise.store.selection import takes
from turnwise.store.statements import is_among
from turnwise.types import (
    DEFAULT_POLICY,
    IMPORT,
    TRAINED_ROLES,
    GroupStatus,
    Json,
    Outcome,
    Role,
    Session,
    SessionKey,
    SessionStatus,
    Split,
)

ESTIMATE = "estimate"
"""The key of a version's metrics that has what was estimated."""
CONFIDENCE = Looks(alpha=0.1)
"""Intervals hold with 90 %: each version is estimated once, and is refused with 5 % at most if it changed nothing."""
KEPT = "kept to estimate what versions change (kept_share)"
"""Why the group of a single session is dropped that is kept from training."""
KEPT_FROM = 500
"""Trained sessions from which on a policy keeps some."""
MOST_READ = 10_000
"""Newest sessions among which those that count are looked for."""
MIN_OF_SLICE = 50
INCOMPLETE = "incomplete"
"""Reason of a turn of which tokens are stored, and not the whole of what was sampled."""
SHOWN_DROP = 0.1
_KEPT_ARM = -2
"""Stands for a version where the sessions that are kept are drawn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Logged:
    """One session that counts."""

    log_weight: float
    """log π − log μ over all tokens that the policy sampled in it; π is the version, μ sampled them."""
    reward: float
    cluster: Hashable
    """Its group: runs of one task are not independent."""
    version: int
    """The newest version that sampled in it."""
    tenant: str
    surprise: off_policy.Surprise = off_policy.UNKNOWN
    slices: Mapping[str, Collection[str]] = dataclasses.field(default_factory=dict)
    """Values by what it is sliced by."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """Sessions that count, newest first, as far as the store tells."""

    experiences: Mapping[SessionKey, Sequence[Experience]]
    """Their chains."""
    unread: Mapping[SessionKey, int]
    """Turns of a session that have tokens and lack logprobs."""
    slices: Mapping[SessionKey, Mapping[str, Collection[str]]]
    oldest: int | None
    """Key of the oldest one, behind which more are read; None where there are no more."""


def keeping(conn: sa.Connection, policy_id: int, share: float, since: int) -> tuple[list[GroupChange], int]:
    """Return what keeps its share of the single sessions that are ready since then, and the instant of the last one.

    They are drawn by their ids, as for a hold-out, so that their rewards decide nothing.
    """
    is_single = groups.c.group_size == 1, groups.c.imported.is_(None), groups.c.part_of.is_(None)
    is_ready = groups.c.status == GroupStatus.READY.value
    is_new = groups.c.policy_id == policy_id, groups.c.ready_at >= since
    is_alone = sa.and_(sessions.c.group_pk == groups.c.group_pk, sessions.c.group_id.is_(None))
    columns = groups.c.group_pk, groups.c.tenant, groups.c.ready_at, sessions.c.session_id
    found = sa.select(*columns).join_from(groups, sessions, is_alone).where(*is_single, is_ready, *is_new)
    rows = conn.execute(found).all()
    kept = [
        row.group_pk for row in rows if takes(_KEPT_ARM, share, Session(session_id=row.session_id, tenant=row.tenant))
    ]
    wanted = sa.and_(is_ready, is_among(conn.dialect, groups.c.group_pk, kept))
    changes = [drop(wanted, KEPT, "kept %d single sessions from training (kept_share)")] if kept else []
    return changes, max((row.ready_at for row in rows), default=since)


def num_trained(conn: sa.Connection, policy_id: int) -> int:
    return int(
        conn.execute(
            sa.select(sa.func.coalesce(sa.func.sum(updates.c.num_sessions), 0)).where(updates.c.policy_id == policy_id)
        ).scalar_one()
    )


def candidates(
    conn: sa.Connection,
    most: int,
    *,
    before: int | None = None,
    roles: Collection[Role] = TRAINED_ROLES,
    policy_id: int = DEFAULT_POLICY,
) -> Candidates:
    """Return the newest sessions of a policy that count, at most `most`; with `before` those older than that one."""
    pks = _newest(conn, most, before, policy_id)
    own = is_among(conn.dialect, sessions.c.session_pk, sorted(pks))
    shape = Shape(roles=roles, merge="chain", with_files=True, policy_id=policy_id)
    by_session: dict[SessionKey, list[Experience]] = defaultdict(list)
    for experience in stream(conn, [own], shape):
        by_session[experience.session_key].append(experience)
    rows = conn.execute(
        sa.select(*(sessions.c[name] for name in ("session_pk", "tenant", "session_id", "agent"))).where(own)
    ).all()
    rows = sorted(rows, key=lambda row: -row.session_pk)
    unread = _unread(conn, pks, roles, policy_id)
    labels = _labels(conn, [(row.tenant, row.session_id) for row in rows])
    keys = {row.session_pk: (row.tenant, row.session_id) for row in rows}
    return Candidates(
        experiences={keys[row.session_pk]: by_session[keys[row.session_pk]] for row in rows},
        unread={keys[pk]: count for pk, count in unread.items()},
        slices={
            (row.tenant, row.session_id): {
                "label": labels.get((row.tenant, row.session_id), ()),
                "harness": [row.agent] if row.agent else [],
            }
            for row in rows
        },
        oldest=min(pks) if len(pks) == most else None,
    )


def _newest(conn: sa.Connection, most: int, before: int | None, policy_id: int) -> list[int]:
    held, of = sessions.c, groups.c
    newest = sa.select(sa.func.max(held.session_pk)).scalar_subquery()
    untrained = sa.or_(of.status == GroupStatus.READY.value, of.reason == KEPT)
    waits = sa.exists().where(of.group_pk == held.group_pk, untrained)
    found = sa.select(held.session_pk).where(
        held.session_pk > newest - MOST_READ,
        *([] if before is None else [held.session_pk < before]),
        held.policy_id == policy_id,
        held.status.in_([SessionStatus.ENDED.value, SessionStatus.EXPIRED.value]),
        held.num_rewards > 0,
        held.opened_by.is_distinct_from(IMPORT),
        MAY_BE_TRAINED,
        sa.or_(held.split == Split.EVAL.value, waits),
        ~sa.exists().where(trained_sessions.c.session_pk == held.session_pk),
    )
    return list(conn.scalars(found.order_by(held.session_pk.desc()).limit(most)))


def _unread(conn: sa.Connection, pks: Sequence[int], roles: Collection[Role], policy_id: int) -> dict[int, int]:
    """Count by session the turns that the policy sampled and that no chain has."""
    counted = (
        sa.select(turns.c.session_pk, sa.func.count())
        .where(
            is_among(conn.dialect, turns.c.session_pk, sorted(pks)),
            turns.c.policy_id == policy_id,
            ~HAS_TRAINABLE_OUTCOME,
            # A redacted reply has no tokens, and was sampled; a call that failed sampled nothing.
            sa.or_(sa.func.length(turns.c.token_ids) > 0, turns.c.outcome == Outcome.UNTRAINABLE.value),
            sa.func.coalesce(turns.c.role, Role.MAIN.value).in_([role.value for role in roles]),
        )
        .group_by(turns.c.session_pk)
    )
    return {pk: int(count) for pk, count in conn.execute(counted)}


def _labels(conn: sa.Connection, keys: Iterable[SessionKey]) -> dict[SessionKey, Collection[str]]:
    by_tenant: dict[str, list[str]] = defaultdict(list)
    for tenant, session_id in keys:
        by_tenant[tenant].append(session_id)
    found: dict[SessionKey, Collection[str]] = {}
    for tenant, ids in by_tenant.items():
        values = extensions.read_columns(conn, "session", tenant, ids)
        found |= {(tenant, each): [label.label for label in values.add({}, each).get("labels", ())] for each in ids}
    return found


def task_kind(task: str, pattern: str | None) -> str:
    """Return what a task is of: what `kind_pattern` finds in its id, else the id itself."""
    found = None if pattern is None else re.search(pattern, task)
    return task if found is None else found.group(1 if found.re.groups else 0)


def nothing(reason: str, num: int = 0, left_out: Mapping[str, int] = types.MappingProxyType({})) -> Json:
    """Return what is said where nothing was computed."""
    return estimate([], left_out) | {"num_sessions": num, "reason": reason}


def estimate(found: Sequence[Logged], left_out: Mapping[str, int]) -> Json:
    """Return what is said of a version: `change` with `low` and `high`, or the `reason` why nothing can be said.

    `left_out` counts the turns without a propensity by reason; their sessions are not among those found. Every tenant
    reads a version's metrics, so sessions of several tenants are not sliced by their labels, harnesses and tasks.
    """
    whole = _change(found)
    said = _said(whole)
    if whole.interval is None and not whole.is_off and whole.num_effective < MIN_EFFECTIVE <= whole.num:
        said["reason"] += f"; {_canary(found)} sessions of a canary would show a drop of {SHOWN_DROP:g}"
    num_left_out = sum(left_out.values())
    versions = Counter(str(each.version) for each in found)
    return said | {
        "num_turns_left_out": num_left_out,
        "left_out": dict(sorted(left_out.items())),
        "versions": dict(sorted(versions.items(), key=lambda item: int(item[0]))),
        "slices": _slices(found),
    }


def in_words(estimated: Json) -> str:
    """Return a stored estimate as a sentence."""
    if estimated.get("change") is None:
        text = str(estimated["reason"])
    else:
        text = (
            f"mean reward {estimated['change']:+.3f} [{estimated['low']:+.3f}, {estimated['high']:+.3f}] (90 %) over "
            f"{estimated['num_sessions']} sessions; {estimated['logged_share']:.0%} of what it would do was logged"
        )
    left_out = estimated.get("num_turns_left_out")
    return text + (f"; {left_out} turns have no known probability, and their sessions are left out" if left_out else "")


def is_certainly_as_good(metrics: Json, served: int, drop: float) -> bool:
    """Return whether a version with these metrics certainly earns no less than the served one, but for a drop.

    Only sessions that the served version sampled say so: against older ones even a worse version may gain.
    """
    slices = (metrics.get(ESTIMATE) or {}).get("slices", ())
    of_served = next((each for each in slices if (each["by"], each["value"]) == ("version", str(served))), None)
    return of_served is not None and of_served["low"] is not None and of_served["low"] >= -drop


def _change(found: Sequence[Logged], least: int = MIN_SESSIONS) -> off_policy.Change:
    rewards = [each.reward for each in found]
    bounds = min([0.0, *rewards]), max([1.0, *rewards])
    logs, clusters = [each.log_weight for each in found], [each.cluster for each in found]
    surprises = [each.surprise for each in found]
    return change(logs, rewards, CONFIDENCE, bounds, clusters=clusters, surprises=surprises, least=least)


def _said(of: off_policy.Change) -> Json:
    interval = of.interval
    return {
        "change": None if interval is None else interval.mean,
        "low": None if interval is None else interval.low,
        "high": None if interval is None else interval.high,
        "reason": of.reason,
        "num_sessions": of.num,
        "logged_share": of.num_effective / of.num if of.num else None,
        "mean_weight": of.mean_weight if math.isfinite(of.mean_weight) else None,
        "is_off": of.is_off,
    }


def _slices(found: Sequence[Logged]) -> list[Json]:
    by: dict[tuple[str, str], list[Logged]] = defaultdict(list)
    for each in found:
        by["version", str(each.version)].append(each)
        for name, values in each.slices.items():
            for value in values:
                by[name, value].append(each)
    if len({each.tenant for each in found}) > 1:
        by = defaultdict(list, {place: of for place, of in by.items() if place[0] == "version"})
    return [
        {"by": name, "value": value} | _said(_change(of, MIN_OF_SLICE))
        for (name, value), of in sorted(by.items())
        if len(of) >= MIN_OF_SLICE
    ]


def _canary(found: Sequence[Logged]) -> int:
    """Return how many sessions in each arm show a drop of `SHOWN_DROP` with the confidence of an estimate."""
    rewards = [each.reward for each in found]
    mean = sum(rewards) / len(rewards)
    variance = max(sum((each - mean) ** 2 for each in rewards) / len(rewards), 0.01)
    return math.ceil(2 * variance * (CONFIDENCE.margin(1.0, len(rewards), math.inf) / SHOWN_DROP) ** 2)
