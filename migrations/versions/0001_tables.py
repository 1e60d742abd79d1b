"""The tables of release 0.2, as `turnwise.store.tables` declares them.

Until 0.2 a change of the tables is made there. The release replaces this module by a frozen copy of the declarations,
and from then on a change is a new migration, which only adds.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy.schema import CreateIndex, CreateTable

from turnwise.store.tables import indexes, metadata

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables."""
    for table in metadata.sorted_tables:
        op.execute(CreateTable(table))
    for index in indexes:
        op.execute(CreateIndex(index))


def downgrade() -> None:
    """Drop all tables."""
    metadata.drop_all(op.get_bind())
