"""What each trainer is doing now."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.create_table(
        "trainer_status",
        sa.Column("trainer_id", sa.Text, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.Column("starts_at", sa.BigInteger),
        sa.Column("reported_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("trainer_id", name="pk_trainer_status"),
    )


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_table("trainer_status")
