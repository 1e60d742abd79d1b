"""An index by which the groups of imported sessions are found without reading all groups."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    imported = sa.text("imported IS NOT NULL")
    op.create_index(
        "ix_groups_imported", "groups", ["imported", "group_pk"], sqlite_where=imported, postgresql_where=imported
    )


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_index("ix_groups_imported", "groups")
