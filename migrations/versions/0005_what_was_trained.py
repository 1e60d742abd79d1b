"""The sessions of each update, and pins that end with the next version."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    serial = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "trained_sessions",
        sa.Column("update_id", sa.Integer, nullable=False),
        sa.Column("session_pk", serial, nullable=False),
        sa.Column("policy_version", sa.Integer, nullable=False),
        sa.Column("advantages", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(
            ["session_pk"], ["sessions.session_pk"], name="fk_trained_sessions_session_pk_sessions"
        ),
        sa.PrimaryKeyConstraint("session_pk", "update_id", name="pk_trained_sessions"),
    )
    op.create_index("ix_trained_sessions_update", "trained_sessions", ["update_id"])
    op.create_index("ix_groups_update", "groups", ["update_id"])
    op.add_column("serving", sa.Column("pinned_until", sa.Integer))


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_column("serving", "pinned_until")
    op.drop_index("ix_groups_update", "groups")
    op.drop_table("trained_sessions")
