"""Where trainers hand out the weights that they hold in memory."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.create_table(
        "weight_servers",
        sa.Column("trainer_id", sa.Text, nullable=False),
        sa.Column("url", sa.Text, nullable=False),
        sa.Column("announced_at", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("trainer_id", name="pk_weight_servers"),
    )


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_table("weight_servers")
