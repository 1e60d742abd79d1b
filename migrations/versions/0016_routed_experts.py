"""The experts to which a mixture of experts routed a turn's tokens."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("turns", sa.Column("routed_experts", sa.LargeBinary))


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_column("turns", "routed_experts")
