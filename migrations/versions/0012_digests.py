"""Digests of turns, reward lines, trained batches and weights."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

COLUMNS = (
    ("turns", "digest", sa.LargeBinary),
    ("rewards", "digest", sa.LargeBinary),
    ("trained_sessions", "digest", sa.LargeBinary),
    ("updates", "batch_digest", sa.Text),
    ("policies", "weights_digest", sa.Text),
)


def upgrade() -> None:
    """Go to this revision."""
    for table, column, kind in COLUMNS:
        op.add_column(table, sa.Column(column, kind))


def downgrade() -> None:
    """Go back to the revision before."""
    for table, column, _ in reversed(COLUMNS):
        op.drop_column(table, column)
