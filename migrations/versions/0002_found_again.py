"""Turns that are found by their conversation, and answers that are forgotten by their age."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("turns", sa.Column("inferred_by", sa.Text))
    op.create_index(
        "ix_turns_inferred",
        "turns",
        ["inferred_by", "history_digest"],
        sqlite_where=sa.text("inferred_by IS NOT NULL"),
        postgresql_where=sa.text("inferred_by IS NOT NULL"),
    )
    op.create_index("ix_idempotency_created_at", "idempotency", ["created_at"])


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_index("ix_idempotency_created_at", "idempotency")
    op.drop_index("ix_turns_inferred", "turns")
    op.drop_column("turns", "inferred_by")
