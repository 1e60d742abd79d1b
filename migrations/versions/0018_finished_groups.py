"""An index by which stalled groups are found without reading open groups that have no finished session."""

from __future__ import annotations

from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.create_index("ix_groups_finished", "groups", ["status", "num_finished"])


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_index("ix_groups_finished", "groups")
