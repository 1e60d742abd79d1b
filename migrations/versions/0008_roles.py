"""The role of a turn's chain in its session."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("turns", sa.Column("role", sa.Text))
    op.add_column("turns", sa.Column("role_reason", sa.Text))


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_column("turns", "role_reason")
    op.drop_column("turns", "role")
