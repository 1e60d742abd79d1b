"""The tables of release 0.2.

Until then a change of the tables is made here. From 0.2 on it is a new migration, which only adds.
Of two indexes that serve a query equally well, SQLite takes the one that was created last.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")
"""SQLite assigns row numbers only to a key of type INTEGER."""


def upgrade() -> None:
    """Create all tables."""
    _groups_and_sessions()
    _turns()
    _rewards()
    _training()
    _policies()
    _processes()


def downgrade() -> None:
    """Drop all tables."""
    for table in (
        "secrets",
        "token_usage",
        "api_keys",
        "engine_minutes",
        "leases",
        "policy_versions",
        "policies",
        "weight_servers",
        "trainer_status",
        "trained_sessions",
        "updates",
        "idempotency",
        "feedback",
        "rewards",
        "turns",
        "session_labels",
        "sessions",
        "groups",
    ):
        op.drop_table(table)


def _groups_and_sessions() -> None:
    """Runs of agents, the groups that they are centred in, and their labels."""
    op.create_table(
        "groups",
        sa.Column("group_pk", Serial, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("group_size", sa.Integer),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("num_sessions", sa.Integer, nullable=False),
        sa.Column("num_finished", sa.Integer, nullable=False),
        sa.Column("policy_id", sa.Integer, nullable=False),
        sa.Column("policy_version_first", sa.Integer),
        sa.Column("last_active_at", sa.BigInteger, nullable=False),
        sa.Column("ready_at", sa.BigInteger),
        sa.Column("trainer_id", sa.Text),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("leased_until", sa.BigInteger),
        sa.Column("update_id", sa.Integer),
        sa.Column("reason", sa.Text),
        sa.Column("imported", sa.Integer),
        sa.PrimaryKeyConstraint("group_pk", name="pk_groups"),
        sa.UniqueConstraint("tenant", "group_id", name="uq_groups_tenant_group_id"),
    )
    op.create_index("ix_groups_status", "groups", ["status", "policy_id", "ready_at"])
    op.create_index("ix_groups_update", "groups", ["update_id"])
    op.create_index("ix_groups_tenant", "groups", ["tenant", "status"])
    op.create_index("ix_groups_activity", "groups", ["status", "last_active_at"])
    op.create_index("ix_groups_finished", "groups", ["status", "num_finished"])
    _create_index_where_set("imported", "ix_groups_imported", "groups", ["imported", "group_pk"])
    op.create_table(
        "sessions",
        sa.Column("session_pk", Serial, autoincrement=True, nullable=False),
        sa.Column("group_pk", Serial),
        sa.Column("num_rewards", sa.Integer, nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("group_id", sa.Text),
        sa.Column("group_size", sa.Integer),
        sa.Column("split", sa.Text, nullable=False),
        sa.Column("credit", sa.Text, nullable=False),
        sa.Column("gamma", sa.Float, nullable=False),
        sa.Column("sampling", sa.Text, nullable=False),
        sa.Column("metadata", sa.Text, nullable=False),
        sa.Column("user_id", sa.Text),
        sa.Column("opened_by", sa.Text),
        sa.Column("continues", sa.Text),
        sa.Column("policy_id", sa.Integer, nullable=False),
        sa.Column("arm", sa.Integer),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("termination_reason", sa.Text),
        sa.Column("num_turns", sa.Integer, nullable=False),
        sa.Column("num_chains", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("last_active_at", sa.BigInteger, nullable=False),
        sa.Column("ended_at", sa.BigInteger),
        sa.ForeignKeyConstraint(["group_pk"], ["groups.group_pk"], name="fk_sessions_group_pk_groups"),
        sa.PrimaryKeyConstraint("session_pk", name="pk_sessions"),
        sa.UniqueConstraint("tenant", "session_id", name="uq_sessions_tenant_session_id"),
    )
    op.create_index("ix_sessions_group", "sessions", ["tenant", "group_id"])
    op.create_index("ix_sessions_group_pk", "sessions", ["group_pk"])
    op.create_index("ix_sessions_status", "sessions", ["status", "last_active_at"])
    _create_index_where(
        "group_id IS NULL AND ended_at IS NOT NULL", "ix_sessions_live", "sessions", ["status", "last_active_at"]
    )
    op.create_index("ix_sessions_task", "sessions", ["tenant", "task_id"])
    op.create_index("ix_sessions_tenant", "sessions", ["tenant", "session_pk"])
    op.create_index("ix_sessions_tenant_status", "sessions", ["tenant", "status", "session_pk"])
    op.create_index("ix_sessions_created", "sessions", ["created_at"])
    op.create_index("ix_sessions_split", "sessions", ["split", "session_pk"])
    _create_index_where_set("user_id", "ix_sessions_user", "sessions", ["tenant", "user_id"])
    op.create_table(
        "session_labels",
        sa.Column("session_pk", Serial, autoincrement=False, nullable=False),
        sa.Column("label", sa.Text, nullable=False),
        sa.Column("note", sa.Text),
        sa.Column("written_by", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["session_pk"], ["sessions.session_pk"], name="fk_session_labels_session_pk_sessions", ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("session_pk", "label", name="pk_session_labels"),
    )
    op.create_index("ix_session_labels_label", "session_labels", ["label", "tenant", "session_pk"])


def _turns() -> None:
    """Model calls."""
    op.create_table(
        "turns",
        sa.Column("session_pk", Serial, nullable=False),
        sa.Column("turn_id", sa.Text, nullable=False),
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
        sa.Column("role", sa.Text),
        sa.Column("role_reason", sa.Text),
        sa.Column("policy_version_first", sa.Integer, nullable=False),
        sa.Column("policy_version_last", sa.Integer, nullable=False),
        sa.Column("history_digest", sa.LargeBinary, nullable=False),
        sa.Column("messages_digest", sa.LargeBinary, nullable=False),
        sa.Column("dialogue_digest", sa.LargeBinary, nullable=False),
        sa.Column("request_key", sa.Text),
        sa.Column("request_digest", sa.LargeBinary),
        sa.Column("inferred_by", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("ttft_seconds", sa.Float),
        sa.Column("duration_seconds", sa.Float, nullable=False),
        sa.Column("routed_experts", sa.LargeBinary),
        sa.Column("digest", sa.LargeBinary),
        sa.ForeignKeyConstraint(["session_pk"], ["sessions.session_pk"], name="fk_turns_session_pk_sessions"),
        sa.PrimaryKeyConstraint("turn_id", name="pk_turns"),
        sa.UniqueConstraint("session_pk", "seq", name="uq_turns_session_pk_seq"),
    )
    _create_index_where_set("request_key", "ix_turns_request", "turns", ["session_pk", "request_key"], unique=True)
    _create_index_where_set("inferred_by", "ix_turns_inferred", "turns", ["inferred_by", "history_digest"])
    _create_index_where_set("inferred_by", "ix_turns_inferred_dialogue", "turns", ["inferred_by", "dialogue_digest"])
    _create_index_where("outcome = 'error'", "ix_turns_failed", "turns", ["created_at"])


def _rewards() -> None:
    """The ledger of rewards, the feedback of people, and the answers to repeated posts."""
    op.create_table(
        "rewards",
        sa.Column("reward_id", Serial, autoincrement=True, nullable=False),
        sa.Column("session_pk", Serial, nullable=False),
        sa.Column("turn_id", sa.Text),
        sa.Column("step", sa.Integer),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("source", sa.Text),
        sa.Column("written_by", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("digest", sa.LargeBinary),
        sa.ForeignKeyConstraint(["session_pk"], ["sessions.session_pk"], name="fk_rewards_session_pk_sessions"),
        sa.PrimaryKeyConstraint("reward_id", name="pk_rewards"),
    )
    op.create_index("ix_rewards_session", "rewards", ["session_pk"])
    op.create_table(
        "feedback",
        sa.Column("session_pk", Serial, nullable=False),
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("content", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text),
        sa.Column("source", sa.Text),
        sa.Column("written_by", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["session_pk"], ["sessions.session_pk"], name="fk_feedback_session_pk_sessions"),
        sa.PrimaryKeyConstraint("session_pk", "turn_id", "kind", "name", name="pk_feedback"),
    )
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("body_digest", sa.LargeBinary, nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "session_id", "key", name="pk_idempotency"),
    )
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"])


def _training() -> None:
    """Updates, the sessions that they trained, and the trainers' state."""
    op.create_table(
        "updates",
        sa.Column("update_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("policy_id", sa.Integer, nullable=False),
        sa.Column("trainer_id", sa.Text, nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.Column("num_groups", sa.Integer, nullable=False),
        sa.Column("num_sessions", sa.Integer, nullable=False),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("batch_digest", sa.Text),
        sa.PrimaryKeyConstraint("update_id", name="pk_updates"),
    )
    op.create_table(
        "trained_sessions",
        sa.Column("session_pk", Serial, autoincrement=False, nullable=False),
        sa.Column("update_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.Column("advantages", sa.Text, nullable=False),
        sa.Column("digest", sa.LargeBinary),
        sa.ForeignKeyConstraint(
            ["session_pk"], ["sessions.session_pk"], name="fk_trained_sessions_session_pk_sessions"
        ),
        sa.PrimaryKeyConstraint("session_pk", "update_id", name="pk_trained_sessions"),
    )
    op.create_index("ix_trained_sessions_update", "trained_sessions", ["update_id"])
    op.create_table(
        "trainer_status",
        sa.Column("trainer_id", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("starts_at", sa.BigInteger),
        sa.Column("reported_at", sa.BigInteger, nullable=False),
        sa.Column("seen_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("trainer_id", name="pk_trainer_status"),
    )
    op.create_table(
        "weight_servers",
        sa.Column("trainer_id", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("announced_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("trainer_id", name="pk_weight_servers"),
    )


def _policies() -> None:
    """Named policies with their pins, and the published versions of all policies."""
    op.create_table(
        "policies",
        sa.Column("policy_id", Serial, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("base_version", sa.Integer),
        sa.Column("pinned_version", sa.Integer),
        sa.Column("pinned_until", sa.Integer),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("archived_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("policy_id", name="pk_policies"),
        sa.UniqueConstraint("tenant", "name", name="uq_policies_tenant_name"),
    )
    op.create_table(
        "policy_versions",
        sa.Column("version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("policy_id", sa.Integer, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("update_id", sa.Integer),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("reload_seconds", sa.Float),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("activated_at", sa.BigInteger),
        sa.Column("weights_digest", sa.Text),
        sa.Column("model_digest", sa.Text),
        sa.Column("arms", sa.Text),
        sa.Column("arm_share", sa.Float),
        sa.PrimaryKeyConstraint("version", name="pk_policy_versions"),
    )
    op.create_index("ix_policy_versions_status", "policy_versions", ["status", "policy_id"])
    op.create_index("ix_policy_versions_policy", "policy_versions", ["policy_id", "version"])


def _processes() -> None:
    """Leases, keys, budgets and activity, which processes share."""
    op.create_table(
        "leases",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "engine_minutes",
        sa.Column("minute", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("served", sa.BigInteger, nullable=False),
        sa.Column("busy", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("minute", "engine", name="pk_engine_minutes"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("policy_id", sa.Integer, nullable=False),
        sa.Column("secret_hash", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("revoked_at", sa.BigInteger),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("last_used_at", sa.BigInteger),
        sa.Column("token_budget", sa.BigInteger),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
    )
    op.create_table(
        "token_usage",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("day", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("num_tokens", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key_id", "day", name="pk_token_usage"),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
    )


def _create_index_where_set(condition: str, name: str, table: str, columns: list[str], *, unique: bool = False) -> None:
    """Create an index of the rows whose column `condition` is not null."""
    _create_index_where(f"{condition} IS NOT NULL", name, table, columns, unique=unique)


def _create_index_where(condition: str, name: str, table: str, columns: list[str], *, unique: bool = False) -> None:
    """Create an index of the rows that fulfil a condition."""
    where = sa.text(condition)
    op.create_index(name, table, columns, unique=unique, sqlite_where=where, postgresql_where=where)
