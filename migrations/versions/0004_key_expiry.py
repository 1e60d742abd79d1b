"""Expiry and last use of API keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("api_keys", sa.Column("expires_at", sa.BigInteger))
    op.add_column("api_keys", sa.Column("last_used_at", sa.BigInteger))


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_column("api_keys", "last_used_at")
    op.drop_column("api_keys", "expires_at")
