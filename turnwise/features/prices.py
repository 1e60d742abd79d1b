"""What calls cost, where there are prices: stored with their turns, summed by session, key, policy and update."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import sqlalchemy as sa

from turnwise.store.extensions import Column, Extension
from turnwise.store.schema import Serial, groups, index, metadata, sessions
from turnwise.store.statements import execute_many, is_among, mark, unindexed

CHARGE = "charge"
"""The key of a turn's row that holds what its call costs."""
Charge: TypeAlias = tuple[str, int, str, Decimal]
"""What a call costs: the key, the policy, the currency and the amount."""
COST_DIGITS = 10
costs = sa.Table(
    "costs",
    metadata,
    sa.Column("cost_id", Serial, primary_key=True, autoincrement=True),
    sa.Column("tenant", sa.Text, nullable=False),
    sa.Column("session_pk", sa.ForeignKey("sessions.session_pk", ondelete="SET NULL")),
    sa.Column("key_id", sa.Text, nullable=False),
    sa.Column("policy_id", sa.Integer, nullable=False),
    sa.Column("currency", sa.Text, nullable=False),
    sa.Column("amount", sa.BigInteger, nullable=False),
    sa.UniqueConstraint("session_pk", "key_id", "policy_id", "currency"),
    # All that the sums over keys and policies read.
    index("ix_costs_key", "tenant", "key_id", "policy_id", "currency", "amount"),
)
"""Each call is rounded to `COST_DIGITS` decimal places, of which `amount` is the number. A deleted session leaves its
costs to its key and policy, without naming it."""
_ADD = (
    "INSERT INTO costs (tenant, session_pk, key_id, policy_id, currency, amount) "
    "VALUES ({value}, {value}, {value}, {value}, {value}, {value}) "
    "ON CONFLICT (session_pk, key_id, policy_id, currency) DO UPDATE SET amount = costs.amount + excluded.amount"
)


def _add_charges(conn: sa.Connection, stored: Sequence[Mapping[str, Any]]) -> None:
    charges = [
        (row["tenant"], row["session_pk"], *charge[:3], int(charge[3].scaleb(COST_DIGITS).to_integral_value()))
        for row in stored
        if (charge := row.get(CHARGE)) is not None
    ]
    if charges:
        execute_many(conn, _ADD.format(value=mark(conn.dialect)), charges)


def _forget_sessions(conn: sa.Connection, session_pks: Sequence[int]) -> None:
    of_sessions = is_among(conn.dialect, costs.c.session_pk, session_pks)
    conn.execute(sa.update(costs).where(of_sessions).values(session_pk=None))


def read_costs(
    conn: sa.Connection, by: str, tenant: str | None, among: Collection[Any] | None = None
) -> dict[Any, dict[str, str]]:
    """Return what a tenant's calls cost, as decimal numbers by currency, by session, key, policy or update.

    An update costs what its policy cost in the sessions of its groups, the dropped ones included. What costs nothing is
    left out.
    """
    c = costs.c
    name = {"session": sessions, "update": groups}.get(by, costs).c[f"{by}_id"]
    found = sa.select(name, c.currency, sa.func.sum(c.amount)).group_by(name, c.currency).order_by(name, c.currency)
    if by in ("session", "update"):
        found = found.join(sessions, c.session_pk == sessions.c.session_pk)
    if by == "update":
        group_pk = sa.func.coalesce(groups.c.part_of, groups.c.group_pk)
        found = found.join(groups, sa.and_(sessions.c.group_pk == group_pk, c.policy_id == groups.c.policy_id))
    if tenant is not None:
        of = {"session": sessions.c.tenant, "update": unindexed(c.tenant)}.get(by, c.tenant)
        found = found.where(of == tenant)
    if among is not None:
        found = found.where(is_among(conn.dialect, name, among))
    shown: dict[Any, dict[str, str]] = {}
    for of, currency, amount in conn.execute(found):
        exact = f"{Decimal(int(amount)).scaleb(-COST_DIGITS):f}"
        shown.setdefault(of, {})[currency] = exact.rstrip("0").rstrip(".")
    return shown


COST = Column(
    name="cost",
    of=frozenset({"session", "key", "policy", "update"}),
    read=read_costs,
    empty={},
    kind=dict[str, str],
    description="Its calls' cost by currency; left out without `prices`.",
)
EXTENSION = Extension(
    after_append=_add_charges, after_deletion=_forget_sessions, tables_of_tenants=(costs,), columns=(COST,)
)
