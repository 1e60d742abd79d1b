"""`turnwise keys`: API keys."""

from __future__ import annotations

import datetime as dt

import click

from turnwise.commands.location import database_option, database_url, json_option
from turnwise.commands.output import print_records, print_stored
from turnwise.types import utc_now

KEY_COLUMNS = (
    *("key_id", "tenant", "role", "name", "created_at", "last_used_at", "expires_at", "revoked_at"),
    *("token_budget", "tokens_used"),
)


@click.group("keys")
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command("create")
@click.option("--role", type=click.Choice(["agent", "trainer", "admin"]), default="agent", show_default=True)
@click.option("--tenant", default="default", show_default=True, help="Tenant whose data the key reaches.")
@click.option("--name", default="", help="What it is for.")
@click.option("--expires-days", type=click.FloatRange(min=0, min_open=True), help="Days that it is accepted for.")
@click.option("--token-budget", type=click.IntRange(min=1), help="Prompt and sampled tokens that its calls may use.")
@database_option
@json_option
def keys_create(
    role: str,
    tenant: str,
    name: str,
    expires_days: float | None,
    token_budget: int | None,
    database: str | None,
    *,
    as_json: bool,
) -> None:
    """Create a key. It is printed once and stored as a hash."""
    from turnwise.commands.store import opened
    from turnwise.store import keys as stored

    expires_at = None if expires_days is None else utc_now() + dt.timedelta(days=expires_days)
    with opened(database_url(database)) as store, store.write() as conn:
        key_id, key = stored.create_key(
            conn, tenant, stored.KeyRole(role), name, expires_at=expires_at, token_budget=token_budget
        )
    made = {"key_id": key_id, "key": key, "tenant": tenant, "role": role, "name": name}
    print_records(made, as_json=as_json)


@keys.command("list")
@click.option("--tenant", help="Only this tenant's.")
@database_option
@json_option
def keys_list(tenant: str | None, database: str | None, *, as_json: bool) -> None:
    """List the keys, revoked ones included."""
    from turnwise.commands.store import opened
    from turnwise.exchange.session_document import as_json as values_of
    from turnwise.store import keys as stored
    from turnwise.store import usage

    url = database_url(database)
    with opened(url) as store, store.read() as conn:
        used = usage.used_by_key(conn, tenant)
        found = [{**values_of(key), "tokens_used": used.get(key.key_id, 0)} for key in stored.list_keys(conn, tenant)]
    print_stored(found, "keys", url, as_json=as_json, columns=KEY_COLUMNS)


@keys.command("revoke")
@click.argument("key_id")
@database_option
@json_option
def keys_revoke(key_id: str, database: str | None, *, as_json: bool) -> None:
    """Revoke a key: it is refused from now on."""
    from turnwise.commands.store import opened
    from turnwise.exchange.session_document import as_json as values_of
    from turnwise.store import keys as stored

    with opened(database_url(database)) as store, store.write() as conn:
        revoked = values_of(stored.revoke_key(conn, key_id))
    print_records(revoked, as_json=as_json, columns=("key_id", "tenant", "role", "name", "revoked_at"))
