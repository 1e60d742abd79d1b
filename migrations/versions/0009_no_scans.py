"""Indexes for what is read by tenant, by age or by split, so that no statement scans sessions or groups."""

from __future__ import annotations

from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

INDEXES = {
    "ix_sessions_tenant": ("sessions", ["tenant", "session_pk"]),
    "ix_sessions_tenant_status": ("sessions", ["tenant", "status", "session_pk"]),
    "ix_sessions_created": ("sessions", ["created_at"]),
    "ix_sessions_split": ("sessions", ["split", "session_pk"]),
    "ix_groups_tenant": ("groups", ["tenant", "status"]),
    "ix_groups_activity": ("groups", ["status", "last_active_at"]),
}


def upgrade() -> None:
    """Go to this revision."""
    for name, (table, columns) in INDEXES.items():
        op.create_index(name, table, columns)


def downgrade() -> None:
    """Go back to the revision before."""
    for name, (table, _) in INDEXES.items():
        op.drop_index(name, table)
