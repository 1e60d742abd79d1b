"""Every table and column, declared once. Migrations make them; nothing else names a column.

One decision: a turn stores its parent and only what came after it, so a session of T turns costs O(T). Arrays are
little-endian blobs (int32 ids, float32 logprobs), documents are JSON text, instants are integer microseconds since
1970 in UTC: the same bytes on both databases, and nothing for a driver to convert on the hot path.
"""

from __future__ import annotations

import sqlalchemy as sa

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
"""SQLite numbers rows by itself only for its own INTEGER."""
Instant = sa.BigInteger
"""Microseconds since 1970-01-01 UTC."""

sessions = sa.Table(
    "sessions",
    metadata,
    sa.Column("session_pk", Serial, primary_key=True, autoincrement=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("session_id", sa.Text, nullable=False),
    sa.Column("task_id", sa.Text),
    sa.Column("run", sa.Integer, nullable=False),
    sa.Column("group_id", sa.Text),
    sa.Column("group_size", sa.Integer),
    sa.Column("group_pk", sa.ForeignKey("groups.group_pk")),
    sa.Column("split", sa.Text, nullable=False),
    sa.Column("credit", sa.Text, nullable=False),
    sa.Column("gamma", sa.Float, nullable=False),
    sa.Column("sampling", sa.Text, nullable=False),
    sa.Column("metadata", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("termination_reason", sa.Text),
    sa.Column("num_turns", sa.Integer, nullable=False),
    sa.Column("num_chains", sa.Integer, nullable=False),
    sa.Column("num_rewards", sa.Integer, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("last_active_at", Instant, nullable=False),
    sa.Column("ended_at", Instant),
    sa.UniqueConstraint("tenant", "session_id"),
    sa.Index("ix_sessions_group", "tenant", "group_id"),
    sa.Index("ix_sessions_group_pk", "group_pk"),
    sa.Index("ix_sessions_task", "tenant", "task_id"),
    sa.Index("ix_sessions_status", "status", "last_active_at"),
)
"""`group_pk` is null for eval sessions: they are never claimed."""

turns = sa.Table(
    "turns",
    metadata,
    sa.Column("turn_id", sa.Text, primary_key=True),
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk"), nullable=False),
    sa.Column("parent_turn_id", sa.Text),
    sa.Column("chain_id", sa.Text, nullable=False),
    sa.Column("seq", sa.Integer, nullable=False),
    sa.Column("step", sa.Integer, nullable=False),
    sa.Column("dialect", sa.Text, nullable=False),
    sa.Column("model", sa.Text, nullable=False),
    sa.Column("messages", sa.Text, nullable=False),
    sa.Column("tools", sa.Text),
    sa.Column("sampling", sa.Text, nullable=False),
    sa.Column("response", sa.Text, nullable=False),
    sa.Column("prompt_delta", sa.LargeBinary, nullable=False),
    sa.Column("prompt_length", sa.Integer, nullable=False),
    sa.Column("token_ids", sa.LargeBinary, nullable=False),
    sa.Column("logprobs", sa.LargeBinary, nullable=False),
    sa.Column("finish_reason", sa.Text),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("policy_version_first", sa.Integer, nullable=False),
    sa.Column("policy_version_last", sa.Integer, nullable=False),
    sa.Column("history_digest", sa.LargeBinary, nullable=False),
    sa.Column("messages_digest", sa.LargeBinary, nullable=False),
    sa.Column("dialogue_digest", sa.LargeBinary, nullable=False),
    sa.Column("request_key", sa.Text),
    sa.Column("inferred_by", sa.Text),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("ttft_seconds", sa.Float),
    sa.Column("duration_seconds", sa.Float, nullable=False),
    sa.UniqueConstraint("session_pk", "seq"),
    # Few calls carry a key; the others need not pay for its index.
    sa.Index(
        "ix_turns_request",
        "session_pk",
        "request_key",
        unique=True,
        sqlite_where=sa.text("request_key IS NOT NULL"),
        postgresql_where=sa.text("request_key IS NOT NULL"),
    ),
    # Nor do those that name their session pay for being found by their conversation.
    sa.Index(
        "ix_turns_inferred",
        "inferred_by",
        "history_digest",
        sqlite_where=sa.text("inferred_by IS NOT NULL"),
        postgresql_where=sa.text("inferred_by IS NOT NULL"),
    ),
)

rewards = sa.Table(
    "rewards",
    metadata,
    sa.Column("reward_id", Serial, primary_key=True, autoincrement=True),
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk"), nullable=False),
    sa.Column("turn_id", sa.Text),
    sa.Column("step", sa.Integer),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("value", sa.Float, nullable=False),
    sa.Column("source", sa.Text),
    sa.Column("written_by", sa.Text),
    sa.Column("created_at", Instant, nullable=False),
    sa.Index("ix_rewards_session", "session_pk"),
)

idempotency = sa.Table(
    "idempotency",
    metadata,
    sa.Column("tenant", sa.Text, primary_key=True),
    sa.Column("key", sa.Text, primary_key=True),
    sa.Column("body_digest", sa.LargeBinary, nullable=False),
    sa.Column("answer", sa.Text, nullable=False),
    sa.Column("created_at", Instant, nullable=False, index=True),
)
"""Answers to reward posts that carried an `Idempotency-Key`, to give again."""

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
    sa.Column("policy_version_first", sa.Integer),
    sa.Column("last_active_at", Instant, nullable=False),
    sa.Column("ready_at", Instant),
    sa.Column("trainer_id", sa.Text),
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    sa.Column("leased_until", Instant),
    sa.Column("update_id", sa.Integer),
    sa.Column("reason", sa.Text),
    sa.UniqueConstraint("tenant", "group_id"),
    sa.Index("ix_groups_status", "status", "ready_at"),
)
"""The unit of claiming. A session without a group id has a group of size 1 under its own session id."""

updates = sa.Table(
    "updates",
    metadata,
    sa.Column("update_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("trainer_id", sa.Text, nullable=False),
    sa.Column("policy_version", sa.Integer, nullable=False),
    sa.Column("num_groups", sa.Integer, nullable=False),
    sa.Column("num_sessions", sa.Integer, nullable=False),
    sa.Column("num_tokens", sa.Integer, nullable=False),
    sa.Column("metrics", sa.Text, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
)

policies = sa.Table(
    "policies",
    metadata,
    sa.Column("version", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("path", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("status", sa.Text, nullable=False),
    sa.Column("update_id", sa.Integer),
    sa.Column("metrics", sa.Text, nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("reload_seconds", sa.Float),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("activated_at", Instant),
)

serving = sa.Table(
    "serving",
    metadata,
    sa.Column("serving_id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("pinned_version", sa.Integer),
)
"""One row: the version that a person pinned, or null to follow the newest."""

leases = sa.Table(
    "leases",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("owner", sa.Text, nullable=False),
    sa.Column("fencing_token", sa.BigInteger, nullable=False),
    sa.Column("expires_at", Instant, nullable=False),
)
"""Named locks between processes: who may drive a reload now."""

api_keys = sa.Table(
    "api_keys",
    metadata,
    sa.Column("key_id", sa.Text, primary_key=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("role", sa.Text, nullable=False),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("secret_hash", sa.LargeBinary, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("revoked_at", Instant),
)

secrets = sa.Table(
    "secrets",
    metadata,
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("value", sa.LargeBinary, nullable=False),
)
"""Server-side keys that all proxy processes share, such as the one that signs session keys."""
