"""The canary that a session is in, and the share of new sessions that a canary takes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("sessions", sa.Column("canary", sa.Integer))
    op.add_column("policies", sa.Column("canary_share", sa.Float))
    op.create_index("ix_policies_status", "policies", ["status"])


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_index("ix_policies_status", "policies")
    op.drop_column("policies", "canary_share")
    op.drop_column("sessions", "canary")
