"""Labels of sessions."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.create_table(
        "session_labels",
        sa.Column(
            "session_pk",
            sa.BigInteger().with_variant(sa.Integer, "sqlite"),
            sa.ForeignKey("sessions.session_pk", ondelete="CASCADE", name="fk_session_labels_session_pk_sessions"),
            primary_key=True,
            autoincrement=False,
        ),
        sa.Column("label", sa.Text, primary_key=True),
        sa.Column("note", sa.Text),
        sa.Column("written_by", sa.Text),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
    )
    op.create_index("ix_session_labels_label", "session_labels", ["label", "tenant", "session_pk"])


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_table("session_labels")
