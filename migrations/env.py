"""Alembic's environment: it runs migrations on the connection and in the transaction that `Database` passes."""

from __future__ import annotations

from alembic import context

from turnwise.store.schema import metadata

connection = context.config.attributes.get("connection")
if connection is None:
    raise RuntimeError("migrations run through `turnwise db upgrade`, which holds the lock that they need")
context.configure(
    connection=connection,
    target_metadata=metadata,
    render_as_batch=True,  # SQLite changes a column by copying the table
)
with context.begin_transaction():
    context.run_migrations()
