"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    """Go to this revision."""
    _groups_and_sessions()
    _turns()
    _rewards()
    _training()
    _processes()


def downgrade() -> None:
    """Go back to the revision before."""
    for table in (
        "secrets",
        "api_keys",
        "leases",
        "serving",
        "policies",
        "updates",
        "idempotency",
        "rewards",
        "turns",
        "sessions",
        "groups",
    ):
        op.drop_table(table)


def _groups_and_sessions() -> None:
    """Runs of agents, and what they are centred in."""
    op.create_table(
        "groups",
        sa.Column("group_pk", Serial, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("group_id", sa.Text, nullable=False),
        sa.Column("group_size", sa.Integer),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("num_sessions", sa.Integer, nullable=False),
        sa.Column("num_finished", sa.Integer, nullable=False),
        sa.Column("policy_version_first", sa.Integer),
        sa.Column("last_active_at", sa.BigInteger, nullable=False),
        sa.Column("ready_at", sa.BigInteger),
        sa.Column("trainer_id", sa.Text),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("leased_until", sa.BigInteger),
        sa.Column("update_id", sa.Integer),
        sa.Column("reason", sa.Text),
        sa.PrimaryKeyConstraint("group_pk", name="pk_groups"),
        sa.UniqueConstraint("tenant", "group_id", name="uq_groups_tenant_group_id"),
    )
    op.create_index("ix_groups_status", "groups", ["status", "ready_at"])
    op.create_table(
        "sessions",
        sa.Column("session_pk", Serial, autoincrement=True, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("session_id", sa.Text, nullable=False),
        sa.Column("task_id", sa.Text),
        sa.Column("run", sa.Integer, nullable=False),
        sa.Column("group_id", sa.Text),
        sa.Column("group_size", sa.Integer),
        sa.Column("group_pk", Serial),
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
    op.create_index("ix_sessions_task", "sessions", ["tenant", "task_id"])


def _turns() -> None:
    """Model calls."""
    op.create_table(
        "turns",
        sa.Column("turn_id", sa.Text, nullable=False),
        sa.Column("session_pk", Serial, nullable=False),
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
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("ttft_seconds", sa.Float),
        sa.Column("duration_seconds", sa.Float, nullable=False),
        sa.ForeignKeyConstraint(["session_pk"], ["sessions.session_pk"], name="fk_turns_session_pk_sessions"),
        sa.PrimaryKeyConstraint("turn_id", name="pk_turns"),
        sa.UniqueConstraint("session_pk", "seq", name="uq_turns_session_pk_seq"),
    )
    op.create_index(
        "ix_turns_request",
        "turns",
        ["session_pk", "request_key"],
        unique=True,
        sqlite_where=sa.text("request_key IS NOT NULL"),
        postgresql_where=sa.text("request_key IS NOT NULL"),
    )


def _rewards() -> None:
    """The ledger of rewards."""
    op.create_table(
        "rewards",
        sa.Column("reward_id", Serial, autoincrement=True, nullable=False),
        sa.Column("session_pk", Serial, nullable=False),
        sa.Column("turn_id", sa.Text),
        sa.Column("step", sa.Integer),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.Float, nullable=False),
        sa.Column("source", sa.Text),
        sa.Column("written_by", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["session_pk"], ["sessions.session_pk"], name="fk_rewards_session_pk_sessions"),
        sa.PrimaryKeyConstraint("reward_id", name="pk_rewards"),
    )
    op.create_index("ix_rewards_session", "rewards", ["session_pk"])
    op.create_table(
        "idempotency",
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("body_digest", sa.LargeBinary, nullable=False),
        sa.Column("answer", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("tenant", "key", name="pk_idempotency"),
    )


def _training() -> None:
    """What the trainer did, and what is served."""
    op.create_table(
        "updates",
        sa.Column("update_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("trainer_id", sa.Text, nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.Column("num_groups", sa.Integer, nullable=False),
        sa.Column("num_sessions", sa.Integer, nullable=False),
        sa.Column("num_tokens", sa.Integer, nullable=False),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("update_id", name="pk_updates"),
    )
    op.create_table(
        "policies",
        sa.Column("version", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("path", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("update_id", sa.Integer),
        sa.Column("metrics", sa.Text, nullable=False),
        sa.Column("error", sa.Text),
        sa.Column("reload_seconds", sa.Float),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("activated_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("version", name="pk_policies"),
    )
    op.create_table(
        "serving",
        sa.Column("serving_id", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("pinned_version", sa.Integer),
        sa.PrimaryKeyConstraint("serving_id", name="pk_serving"),
    )


def _processes() -> None:
    """What processes share."""
    op.create_table(
        "leases",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("fencing_token", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_leases"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("role", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("secret_hash", sa.LargeBinary, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("revoked_at", sa.BigInteger),
        sa.PrimaryKeyConstraint("key_id", name="pk_api_keys"),
    )
    op.create_table(
        "secrets",
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("value", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("name", name="pk_secrets"),
    )
