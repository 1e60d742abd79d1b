"""Evaluations: which versions sampled the held-out sessions, and the gauges that are stored with a version.

The version is read from the turns, because engines may serve another version than the one that was to be evaluated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection

import sqlalchemy as sa

from turnwise.store import rows
from turnwise.store.tables import policy_versions, sessions, turns
from turnwise.types import DEFAULT_POLICY, Json, SessionKey, Split


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """The oldest and newest policy version of some turns; None without turns or without known versions."""

    oldest: int | None
    newest: int | None


def versions_sampled(conn: sa.Connection, keys: Collection[SessionKey]) -> Sampled:
    """Return which versions sampled these eval sessions."""
    row = conn.execute(
        sa.select(sa.func.min(turns.c.policy_version_first), sa.func.max(turns.c.policy_version_last))
        .join_from(turns, sessions, turns.c.session_pk == sessions.c.session_pk)
        .where(
            sessions.c.split == Split.EVAL.value,
            sa.tuple_(sessions.c.tenant, sessions.c.session_id).in_(list(keys)),
        )
    ).one()
    return Sampled(oldest=row[0], newest=row[1])


def record_evaluation(conn: sa.Connection, version: int, gauges: Json) -> None:
    """Store an evaluation as `eval` in the metrics of its version; a later evaluation replaces it.

    Args:
        conn: A transaction of `Database.write`.
        version: The version; nothing is stored if it was never published.
        gauges: The measured values.
    """
    known = conn.execute(
        sa.select(policy_versions.c.metrics).where(policy_versions.c.version == version)
    ).scalar_one_or_none()
    if known is not None:
        metrics = json.loads(known) | {"eval": gauges}
        conn.execute(
            sa.update(policy_versions).where(policy_versions.c.version == version).values(metrics=rows.dump(metrics))
        )


def evaluated_versions(conn: sa.Connection, policy_id: int = DEFAULT_POLICY) -> dict[int, float]:
    """Return the mean reward of each version of a policy that was evaluated."""
    c = policy_versions.c
    found = conn.execute(sa.select(c.version, c.metrics).where(c.policy_id == policy_id)).all()
    gauges = {row.version: json.loads(row.metrics).get("eval", {}) for row in found}
    return {version: one["reward_mean"] for version, one in gauges.items() if one.get("reward_mean") is not None}
