"""Who opened a session and which one it continues; turns that are found by their dialogue alone."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("sessions", sa.Column("opened_by", sa.Text))
    op.add_column("sessions", sa.Column("continues", sa.Text))
    op.create_index(
        "ix_turns_inferred_dialogue",
        "turns",
        ["inferred_by", "dialogue_digest"],
        sqlite_where=sa.text("inferred_by IS NOT NULL"),
        postgresql_where=sa.text("inferred_by IS NOT NULL"),
    )


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_index("ix_turns_inferred_dialogue", "turns")
    op.drop_column("sessions", "continues")
    op.drop_column("sessions", "opened_by")
