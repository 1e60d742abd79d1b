"""Where trainers hand out versions from memory, and versions that one held and never wrote."""

from __future__ import annotations

import datetime

import sqlalchemy as sa

from turnwise.store.rows import to_micros
from turnwise.store.schema import Instant, metadata, policy_versions
from turnwise.store.versions import LOST
from turnwise.types import DEFAULT_POLICY, PolicyStatus

weight_servers = sa.Table(
    "weight_servers",
    metadata,
    sa.Column("trainer_id", sa.Text, primary_key=True),
    sa.Column("url", sa.Text, nullable=False),
    sa.Column("announced_at", Instant, nullable=False),
)


def announce_weights(conn: sa.Connection, trainer_id: str, url: str | None, now: datetime.datetime) -> None:
    """Store the address of a trainer's weights; None removes it."""
    conn.execute(sa.delete(weight_servers).where(weight_servers.c.trainer_id == trainer_id))
    if url is not None:
        conn.execute(sa.insert(weight_servers).values(trainer_id=trainer_id, url=url, announced_at=to_micros(now)))


def weight_urls(conn: sa.Connection) -> list[str]:
    return list(conn.execute(sa.select(weight_servers.c.url).order_by(weight_servers.c.announced_at.desc())).scalars())


def fail_unwritten(conn: sa.Connection, after: int, policy_id: int = DEFAULT_POLICY) -> list[int]:
    """Fail a policy's versions above this one that a trainer published and never wrote; return them.

    Their turns keep their behaviour logprobs, and their numbers are not used again.
    """
    table = policy_versions
    is_lost = sa.and_(
        table.c.policy_id == policy_id,
        table.c.version > after,
        table.c.update_id.is_not(None),
        table.c.weights_digest.is_(None),
        table.c.status != PolicyStatus.FAILED.value,
    )
    failed = sa.update(table).where(is_lost).values(status=PolicyStatus.FAILED.value, error=LOST)
    return list(conn.execute(failed.returning(table.c.version)).scalars())
