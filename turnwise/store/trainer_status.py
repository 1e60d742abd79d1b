"""What each trainer does, and whether it lives: for the page, `GET /v1/counts`, `/readyz`, the doctor and the metrics.

A trainer reports in words, and a thread of its process renews `seen_at`. One that stops or fails says so; one that was
killed says nothing, and counts as silent after a while. The trainer `NAME/3` trains the policy with the number 3: of
all tenants only the one that owns the policy sees its report. Trainers also say where they hand out the weights that
they hold in memory, and keep here what a restart needs beside the last checkpoint: it names sessions and groups by
digests, and a deletion reaches it.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
from collections.abc import Collection

import sqlalchemy as sa

from turnwise.store.database import clock
from turnwise.store.rows import RowFormat, StoredRow, dump, to_micros
from turnwise.store.tables import policies, trainer_states, weight_servers
from turnwise.store.tables import trainer_status as table
from turnwise.types import DEFAULT_POLICY, GroupKey, Json, SessionKey, name_digest

BEAT_SECONDS = 10.0
"""Time between two signs of life."""
SILENT_SECONDS = 60.0
"""A trainer without a sign of life for this long counts as silent."""


class TrainerState(enum.StrEnum):
    """State of a trainer."""

    RUNNING = "running"
    BLOCKED = "blocked"
    """It runs, and waits for a person: engines refused its last versions."""
    STOPPED = "stopped"
    """It was told to stop, or reached its configured end."""
    DIED = "died"
    """It ended with the error in its report."""
    SILENT = "silent"
    """Neither ended nor seen for a minute: it was killed, or cannot reach the database."""

    @property
    def needs_attention(self) -> bool:
        """Whether nothing is trained any more and nobody asked for that."""
        return self in {TrainerState.BLOCKED, TrainerState.DIED, TrainerState.SILENT}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerStatus:
    """The last report of a trainer."""

    trainer_id: str
    text: str
    """One line, such as `4 of 32 groups are ready`; its error if it died."""
    state: TrainerState = TrainerState.RUNNING
    """`running` or `stopped`; `blocked` after several versions that engines refused, `died` with an error, or `silent`
    without a sign of life for a minute."""
    starts_at: datetime.datetime | None = None
    """When the next batch starts even if it is not full; None if the trainer waits for more groups or trains."""
    reported_at: datetime.datetime


_STATUSES = RowFormat(TrainerStatus, table)


def report_status(conn: sa.Connection, status: TrainerStatus) -> None:
    """Replace the trainer's last report."""
    delete_report(conn, status.trainer_id)
    conn.execute(sa.insert(table).values(_STATUSES.row(status, seen_at=to_micros(status.reported_at))))


def delete_report(conn: sa.Connection, trainer_id: str) -> None:
    """Delete the report of a trainer whose policy was deleted."""
    conn.execute(sa.delete(table).where(table.c.trainer_id == trainer_id))


def note_sign_of_life(conn: sa.Connection, trainer_id: str) -> None:
    """Record that the trainer's process lives."""
    conn.execute(sa.update(table).where(table.c.trainer_id == trainer_id).values(seen_at=clock(conn)))


def trainer_statuses(
    conn: sa.Connection, tenant: str | None = None, now: datetime.datetime | None = None
) -> list[TrainerStatus]:
    """Return the last report of each trainer, newest first; with a tenant, without those of other tenants' policies."""
    found = conn.execute(sa.select(table).order_by(table.c.reported_at.desc())).all()
    if not found:
        return []
    if tenant is not None:
        is_other = policies.c.policy_id != DEFAULT_POLICY, policies.c.tenant != tenant
        hidden = {str(number) for number in conn.execute(sa.select(policies.c.policy_id).where(*is_other)).scalars()}
        found = [row for row in found if row.trainer_id.rpartition("/")[2] not in hidden or "/" not in row.trainer_id]
    seen_since = clock(conn, now) - SILENT_SECONDS * 1_000_000
    return [_status(row, seen_since) for row in found]


def _status(row: StoredRow, seen_since: float) -> TrainerStatus:
    status = _STATUSES.record(row)
    is_silent = status.state in {TrainerState.RUNNING, TrainerState.BLOCKED} and row.seen_at < seen_since
    return dataclasses.replace(status, state=TrainerState.SILENT) if is_silent else status


def announce_weights(conn: sa.Connection, trainer_id: str, url: str | None, now: datetime.datetime) -> None:
    """Store the address of a trainer's weights; None removes it."""
    conn.execute(sa.delete(weight_servers).where(weight_servers.c.trainer_id == trainer_id))
    if url is not None:
        conn.execute(sa.insert(weight_servers).values(trainer_id=trainer_id, url=url, announced_at=to_micros(now)))


def weight_urls(conn: sa.Connection) -> list[str]:
    """Return the addresses of all trainers' weights, the latest announcement first."""
    return list(conn.execute(sa.select(weight_servers.c.url).order_by(weight_servers.c.announced_at.desc())).scalars())


def keep_state(conn: sa.Connection, policy_id: int, state: Json) -> None:
    """Replace what a policy's last batch left that no checkpoint holds; an empty state removes it.

    Args:
        conn: A transaction of `Database.write`.
        policy_id: The policy.
        state: `buffer`, a list of groups that have their digest as `group`, and `singles`, a list of rows whose third
            value is the digest of a session.
    """
    conn.execute(sa.delete(trainer_states).where(trainer_states.c.policy_id == policy_id))
    if state:
        conn.execute(sa.insert(trainer_states).values(policy_id=policy_id, state=dump(state)))


def kept_state(conn: sa.Connection, policy_id: int) -> Json | None:
    """Return what a policy's last batch left; None where the checkpoint holds all."""
    found = conn.execute(sa.select(trainer_states.c.state).where(trainer_states.c.policy_id == policy_id))
    text = found.scalar_one_or_none()
    return None if text is None else json.loads(text)


def forget_in_states(conn: sa.Connection, sessions: Collection[SessionKey], groups: Collection[GroupKey]) -> None:
    """Remove deleted sessions and groups from what trainers keep."""
    gone = {name_digest(key) for key in (*sessions, *groups)}
    for row in conn.execute(sa.select(trainer_states).with_for_update()).all():
        state = json.loads(row.state)
        left = {
            **state,
            "buffer": [each for each in state["buffer"] if each["group"] not in gone],
            "singles": [each for each in state["singles"] if each[2] not in gone],
        }
        if left != state:
            keep_state(conn, row.policy_id, left)
