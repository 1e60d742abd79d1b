"""All tables and columns. Columns that store a record's fields are derived from the record in `turnwise.types`.

A turn stores its parent's id and only the tokens and messages after it, so a session of T turns takes O(T). Arrays are
little-endian blobs (int32 ids, float32 logprobs), documents are JSON text, instants are integer microseconds since 1970
in UTC: the bytes are the same on both databases, and a driver converts nothing on the hot path.

The first migration has these tables as release 0.2 has them; a change here needs another migration.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import types
import typing
from typing import Any

import sqlalchemy as sa

from turnwise.chains import TRAINABLE_OUTCOMES
from turnwise.types import (
    Logprobs,
    Parts,
    Policy,
    PolicyVersion,
    Reward,
    Session,
    TokenIds,
    Turn,
    UpdateRecord,
)

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""SQLite assigns row numbers only to a key of type INTEGER."""
Instant = sa.BigInteger
"""Microseconds since 1970-01-01 UTC."""
DELETED = "deleted"
"""Status of a session whose turns and rewards are still to be deleted. No record has it."""
ROWS_AT_ONCE = "rows_at_once"
"""In a table's `info`: how many of its rows are in memory at once while all are read, where they are large."""
NO_TENANT = ""
"""Tenant of such a session: no query of a tenant finds it, and its own tenant can use its id again."""


def _column_type(kind: Any) -> type[sa.types.TypeEngine[Any]]:
    if kind in (TokenIds, Logprobs, Parts, bytes):
        return sa.LargeBinary
    if typing.get_origin(kind) in (dict, list) or issubclass(kind, (str, enum.StrEnum)):
        return sa.Text
    return {int: sa.Integer, bool: sa.Integer, float: sa.Float, datetime.datetime: Instant}[kind]


def columns_of(
    record: type, *, key: str | None = None, omit: frozenset[str] = frozenset(), required: frozenset[str] = frozenset()
) -> list[sa.Column[Any]]:
    """Return one column for each field of a record.

    Omitted fields are stored in another table, or not at all; required ones may be None in the record alone.
    """
    columns = []
    kinds = typing.get_type_hints(record)
    for field in dataclasses.fields(record):
        if field.name in omit:
            continue
        kind, nullable = kinds[field.name], False
        if isinstance(kind, types.UnionType):
            (kind,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
            nullable = field.name not in required
        column_type = _column_type(kind)
        if field.name == key:
            columns.append(sa.Column(field.name, column_type, primary_key=True, autoincrement=False))
        else:
            columns.append(sa.Column(field.name, column_type, nullable=nullable))
    return columns


indexes: list[sa.Index] = []
"""All indexes in the order of their creation: of two that serve a query equally well, SQLite takes the last one."""


def of_session() -> sa.Column[Any]:
    """Return the key of rows that a session has; the cascade removes them also where its row alone is deleted."""
    return sa.Column(
        "session_pk", sa.ForeignKey("sessions.session_pk", ondelete="CASCADE"), primary_key=True, autoincrement=False
    )


def index(name: str, *columns: str, where: str | None = None, unique: bool = False) -> sa.Index:
    condition = None if where is None else sa.text(where)
    indexes.append(sa.Index(name, *columns, unique=unique, sqlite_where=condition, postgresql_where=condition))
    return indexes[-1]


sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("session_pk", Serial, primary_key=True, autoincrement=True),
    sa.Column("group_pk", sa.ForeignKey("groups.group_pk")),
    sa.Column("num_rewards", sa.Integer, nullable=False),
    *columns_of(Session, omit=frozenset({"reward", "trained_in"})),
    sa.UniqueConstraint("tenant", "session_id"),
    index("ix_sessions_group", "tenant", "group_id"),
    index("ix_sessions_group_pk", "group_pk"),
    index("ix_sessions_task", "tenant", "task_id"),
    index("ix_sessions_status", "status", "last_active_at"),
    index("ix_sessions_live", "status", "last_active_at", where="group_id IS NULL AND ended_at IS NOT NULL"),
    index("ix_sessions_rewarded", "last_active_at", where="status = 'open' AND num_rewards > 0"),
    index("ix_sessions_tenant", "tenant", "session_pk"),
    index("ix_sessions_tenant_status", "tenant", "status", "session_pk"),
    index("ix_sessions_created", "created_at"),
    index("ix_sessions_split", "split", "session_pk"),
    index("ix_sessions_user", "tenant", "user_id", where="user_id IS NOT NULL"),
    index("ix_sessions_key", "tenant", "key_id", where="key_id IS NOT NULL"),
    # Few sessions are marked; the others are not indexed.
    index("ix_sessions_denied", "tenant", "session_pk", where="train = 0"),
)
"""`group_pk` is null for eval sessions: they are never claimed."""

turns = sa.Table(
    "turns",
    metadata,
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk"), nullable=False),
    *columns_of(Turn, key="turn_id", omit=frozenset({"session_id", "tenant"}), required=frozenset({"step"})),
    sa.UniqueConstraint("session_pk", "seq"),
    # Few calls have a key; turns without one are not indexed.
    index("ix_turns_request", "session_pk", "request_key", where="request_key IS NOT NULL", unique=True),
    # Turns of calls that name their session are not searched by conversation and not indexed.
    index("ix_turns_inferred", "inferred_by", "history_digest", where="inferred_by IS NOT NULL"),
    # A handoff changes tools or system message, so its conversation is found by the dialogue alone.
    index("ix_turns_inferred_dialogue", "inferred_by", "dialogue_digest", where="inferred_by IS NOT NULL"),
    # Calls that did not fail are not indexed by time.
    index("ix_turns_failed", "created_at", where="outcome = 'error'"),
    index("ix_turns_policy", "session_pk", "policy_id"),
)
HAS_TRAINABLE_OUTCOME = turns.c.outcome.in_([outcome.value for outcome in TRAINABLE_OUTCOMES])

rewards = sa.Table(
    "rewards",
    metadata,
    sa.Column("reward_id", Serial, primary_key=True, autoincrement=True),
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk"), nullable=False),
    *columns_of(Reward, omit=frozenset({"reward_id", "session_id", "tenant"})),
    index("ix_rewards_session", "session_pk"),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("session_id", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("body_digest", sa.LargeBinary, nullable=False),
    sa.Column("answer", sa.Text, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    index("ix_idempotency_created_at", "created_at"),
)
"""Answers to reward posts with an `Idempotency-Key`, and the sessions of calls with one; a replay gets the same."""

groups = sa.Table(
    "groups",
    metadata,
    sa.Column("group_pk", Serial, primary_key=True, autoincrement=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("group_id", sa.Text, nullable=False),
    sa.Column("group_size", sa.Integer),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("num_sessions", sa.Integer, nullable=False),
    sa.Column("num_finished", sa.Integer, nullable=False),
    sa.Column("policy_id", sa.Integer, nullable=False),
    sa.Column("policy_version_first", sa.Integer),
    sa.Column("last_active_at", Instant, nullable=False),
    sa.Column("ready_at", Instant),
    sa.Column("trainer_id", sa.Text),
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    sa.Column("leased_until", Instant),
    sa.Column("update_id", sa.Integer),
    sa.Column("reason", sa.Text),
    sa.Column("imported", sa.Integer),
    sa.Column("part_of", sa.Integer),
    index("ix_groups_name", "tenant", "group_id", where="part_of IS NULL", unique=True),
    index("ix_groups_part", "part_of", "policy_id", where="part_of IS NOT NULL", unique=True),
    index("ix_groups_status", "status", "policy_id", "ready_at"),
    index("ix_groups_update", "update_id"),
    index("ix_groups_tenant", "tenant", "status"),
    index("ix_groups_activity", "status", "last_active_at"),
    index("ix_groups_finished", "status", "num_finished"),
    # Most groups are not imported, and not indexed.
    index("ix_groups_imported", "imported", "group_pk", where="imported IS NOT NULL"),
)
"""The unit of claiming. A session without a group id has a group of size 1 with the session's id. `imported` is 1 for
groups of imported sessions, which only SFT and DPO train; null otherwise. `part_of` is null for a group of sessions.
Where another policy has sampled in them, that policy's part of the group is a row of its own, which names the group
here: each policy claims and trains its turns by itself. A part exists from when its group is ready."""

updates = sa.Table("updates", metadata, *columns_of(UpdateRecord, key="update_id"))

trained_sessions = sa.Table(
    "trained_sessions",
    metadata,
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk"), primary_key=True),
    sa.Column("update_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("policy_version", sa.Integer, nullable=False),
    sa.Column("advantages", sa.Text, nullable=False),
    sa.Column("digest", sa.LargeBinary),
    index("ix_trained_sessions_update", "update_id"),
)
"""The sessions that an update trained; `advantages` has the advantage of each trained turn, by turn id."""

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("policy_id", Serial, primary_key=True, autoincrement=True),
    *columns_of(Policy, omit=frozenset({"policy_id"})),
    sa.UniqueConstraint("tenant", "name"),
)

policy_versions = sa.Table(
    "policy_versions",
    metadata,
    *columns_of(PolicyVersion, key="version"),
    index("ix_policy_versions_status", "status", "policy_id"),
    index("ix_policy_versions_policy", "policy_id", "version"),
)

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    sa.Column("expires_at", Instant, nullable=False),
)

trainer_status = sa.Table(
    "trainer_status",
    metadata,
    sa.Column("trainer_id", sa.Text, primary_key=True),
    sa.Column("text", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("starts_at", Instant),
    sa.Column("reported_at", Instant, nullable=False),
    sa.Column("seen_at", Instant, nullable=False),
)

trainer_states = sa.Table(
    "trainer_states",
    metadata,
    sa.Column("policy_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("state", sa.Text, nullable=False),
)
"""State that the last batch of a policy left in its trainer, and that no checkpoint holds; no tenant reads it."""

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("policy_id", sa.Integer, nullable=False),
    sa.Column("secret_hash", sa.LargeBinary, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("revoked_at", Instant),
    sa.Column("expires_at", Instant),
    sa.Column("last_used_at", Instant),
    sa.Column("token_budget", sa.BigInteger),
)

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)
"""Secrets that all proxy processes share, such as the key that signs session keys."""
