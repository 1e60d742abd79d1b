"""Token budgets: the tokens that each key used by day, and the budget of a key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Go to this revision."""
    op.add_column("api_keys", sa.Column("token_budget", sa.BigInteger))
    op.create_table(
        "token_usage",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("key_id", sa.Text, primary_key=True),
        sa.Column("day", sa.Integer, primary_key=True, autoincrement=False),
        sa.Column("num_tokens", sa.BigInteger, nullable=False),
    )


def downgrade() -> None:
    """Go back to the revision before."""
    op.drop_table("token_usage")
    op.drop_column("api_keys", "token_budget")
