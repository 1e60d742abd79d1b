"""The digest of the request that an idempotency key was used with."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("turns", sa.Column("request_digest", sa.LargeBinary))


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_column("turns", "request_digest")
