"""The tables of release 0.2, as `turnwise.store.schema` declares them.

Until 0.2 a change of the tables is made there. The release replaces this module by a frozen copy of the declarations,
and from then on a change is a new migration, which only adds.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy.schema import CreateIndex, CreateTable

import turnwise.features  # noqa: F401  the tables of features are declared there
from turnwise.store.rows import to_micros
from turnwise.store.schema import NO_TENANT, indexes, metadata, policies
from turnwise.types import DEFAULT_POLICY, DEFAULT_POLICY_NAME, utc_now

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create all tables, and the default policy."""
    for table in metadata.sorted_tables:
        op.execute(CreateTable(table))
    for index in indexes:
        op.execute(CreateIndex(index))
    default = {"policy_id": DEFAULT_POLICY, "tenant": NO_TENANT, "name": DEFAULT_POLICY_NAME}
    op.bulk_insert(policies, [{**default, "created_at": to_micros(utc_now())}])


def downgrade() -> None:
    """Drop all tables."""
    metadata.drop_all(op.get_bind())
