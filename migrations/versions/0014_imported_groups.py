"""Groups of imported sessions, which only SFT and DPO claim."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("groups", sa.Column("imported", sa.Integer))


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_column("groups", "imported")
