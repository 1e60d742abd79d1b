"""Which sessions a canary and the hold-out take when they are created, and what sessions of two versions earned.

The transaction that creates a session assigns it to an arm or to none, and stores that with the session. So all
processes agree on it, from the session's first call to its last. A canary takes a share of its policy's sessions. The
hold-out takes a share of those without a group, and makes them `eval` sessions: what an old version samples is not
trained, and nobody waits for it. What the sessions of two versions did is counted here; the proxy compares it.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from turnwise import credit
from turnwise.features.earned import Compared, compared
from turnwise.store import serving
from turnwise.store.extensions import Extension
from turnwise.store.rows import to_micros
from turnwise.store.schema import policy_versions, sessions
from turnwise.store.selection import takes
from turnwise.store.serving import ServingState
from turnwise.store.statements import execute
from turnwise.store.versions import change_version, get_version
from turnwise.types import DEFAULT_POLICY, IMPORT, Credit, Json, PolicyStatus, PolicyVersion, Session, Split, utc_now

_RUNNING = (
    "SELECT policy_id, version, arm_share, status FROM policy_versions "  # noqa: S608  constants
    f"WHERE status IN ('{PolicyStatus.CANARY.value}', '{PolicyStatus.HOLDOUT.value}') "
    "AND arm_share IS NOT NULL AND activated_at IS NOT NULL ORDER BY version"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Arm:
    """The finished sessions of one version."""

    rewards: tuple[float, ...] = ()
    num_sessions: int = 0
    num_turns: int = 0
    num_broken: int = 0
    """Turns that failed, are untrainable, or were cut by length."""
    by_name: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)

    @property
    def broken_share(self) -> float:
        return self.num_broken / self.num_turns if self.num_turns else 0.0

    def summary(self, version: int) -> Json:
        return {
            "version": version,
            "num_sessions": self.num_sessions,
            "num_turns": self.num_turns,
            "broken_share": self.broken_share,
            "mean_reward": statistics.fmean(self.rewards) if self.rewards else None,
        }


def opened(conn: sa.Connection, created: Sequence[Session]) -> list[Session]:
    """Return new sessions as they are stored: those that an arm takes name its version."""
    arms = execute(conn, _RUNNING) if created else []
    return [_assigned(session, arms) for session in created]


def _assigned(session: Session, arms: Sequence[Sequence[Any]]) -> Session:
    if session.opened_by == IMPORT:
        return session
    for policy_id, version, share, status in arms:
        if policy_id != session.policy_id or not takes(version, share, session):
            continue
        if status == PolicyStatus.CANARY.value:
            return dataclasses.replace(session, arm=version, explores=None)
        if session.split is Split.TRAIN and session.group_id is None and session.group_size is None:
            return dataclasses.replace(session, arm=version, split=Split.EVAL, explores=None)
    return session


def canary_of(state: ServingState) -> PolicyVersion | None:
    return state.beside.get(PolicyStatus.CANARY)


def holdout_of(state: ServingState) -> PolicyVersion | None:
    return state.beside.get(PolicyStatus.HOLDOUT)


def try_version(conn: sa.Connection, version: int, share: float | None) -> PolicyVersion:
    """Record that this share of the sessions that are created from now on samples with this version as a canary.

    Without a share engines may load it, and no session samples with it yet.
    """
    began_at = None if share is None else utc_now()
    return change_version(
        conn, version, status=PolicyStatus.CANARY, error=None, arms=None, activated_at=began_at, arm_share=share
    )


def record_arms(conn: sa.Connection, version: int, arms: Json) -> None:
    change_version(conn, version, arms=arms)


def activate_version(
    conn: sa.Connection, version: int, reload_seconds: float | None = None, holdout_share: float = 0.0
) -> PolicyVersion:
    """Record that engines serve this version now, and retire its policy's previous one, or make it the hold-out.

    A hold-out stays until a version is served that is not newer; without one, the previous version keeps this share
    of new sessions. `reload_seconds` is how long engines paused.
    """
    state = serving.serving_state(conn, get_version(conn, version).policy_id)
    previous, holdout = state.active, holdout_of(state)
    if holdout is not None and holdout.version >= version:
        end_holdout(conn, holdout.version)
        holdout = None
    activated = serving.activate_version(conn, version, reload_seconds)
    if holdout_share > 0 and holdout is None and previous is not None and previous.version < version:
        change_version(conn, previous.version, status=PolicyStatus.HOLDOUT, arm_share=holdout_share)
    return activated


def end_holdout(conn: sa.Connection, version: int) -> None:
    """Let new sessions sample with the served version instead of this hold-out; other versions do not change."""
    is_held = policy_versions.c.status == PolicyStatus.HOLDOUT.value
    change_version(conn, version, is_held, status=PolicyStatus.RETIRED)


def arms_since(
    conn: sa.Connection, since: datetime.datetime, versions: tuple[int, int], policy_id: int = DEFAULT_POLICY
) -> tuple[Arm, Arm]:
    """Return statistics of a policy's finished sessions that began since then, for each of two of its versions.

    A session counts for the newest version that it sampled with.
    """
    found = compared(conn, sessions.c.created_at >= to_micros(since), sessions.c.policy_id == policy_id)
    newer, older = ([one for one in found if one[0].version == version] for version in versions)
    return _arm_of(newer), _arm_of(older)


def held_out_arms(conn: sa.Connection, holdout: PolicyVersion) -> tuple[Arm, Arm]:
    """Return statistics of the live sessions since a hold-out began: of later versions, and of the hold-out.

    Both are sessions without a group, of the same time, and were assigned at random.
    """
    held_from = 0 if holdout.activated_at is None else to_micros(holdout.activated_at)
    c, is_of_policy = policy_versions.c, sessions.c.policy_id == holdout.policy_id
    is_later = c.policy_id == holdout.policy_id, c.version > holdout.version, c.activated_at > held_from
    began = sa.select(sa.func.min(c.activated_at)).where(*is_later)
    is_live = sa.or_(
        sessions.c.arm == holdout.version, sa.and_(sessions.c.arm.is_(None), sessions.c.split == Split.TRAIN.value)
    )
    since = sessions.c.created_at >= began.scalar_subquery()
    is_over = sessions.c.ended_at.is_not(None)
    found = compared(conn, sessions.c.group_id.is_(None), is_over, is_live, since, is_of_policy)
    newer = [one for one in found if one[0].arm is None and one[0].version > holdout.version]
    return _arm_of(newer), _arm_of([one for one in found if one[0].arm is not None])


def _arm_of(found: Sequence[Compared]) -> Arm:
    judged = [credit.assign_credit([], lines, Credit(row.credit)) for row, lines in found if lines]
    by_name: dict[str, list[float]] = collections.defaultdict(list)
    for one in judged:
        for name, value in one.by_name.items():
            by_name[name].append(value)
    return Arm(
        rewards=tuple(one.reward for one in judged),
        num_sessions=len(found),
        num_turns=sum(row.num_turns for row, _ in found),
        num_broken=sum(row.num_broken for row, _ in found),
        by_name=by_name,
    )


EXTENSION = Extension(opened=opened)
