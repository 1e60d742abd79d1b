"""Seconds in which engines served and ran calls, and the compared sessions of each canary."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("policies", sa.Column("arms", sa.Text))
    op.create_table(
        "engine_minutes",
        sa.Column("minute", sa.Integer, nullable=False, autoincrement=False),
        sa.Column("engine", sa.Text, nullable=False),
        sa.Column("served", sa.BigInteger, nullable=False),
        sa.Column("busy", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("minute", "engine", name=op.f("pk_engine_minutes")),
    )


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_table("engine_minutes")
    op.drop_column("policies", "arms")
