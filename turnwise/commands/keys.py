"""`turnwise keys`: creates, lists and revokes API keys, and sets their token budgets."""

from __future__ import annotations

import datetime as dt

import click

from turnwise.client.wire import given
from turnwise.commands.output import confirm, print_records, print_stored
from turnwise.commands.place import (
    DataPlace,
    database_option,
    database_url,
    json_option,
    opened,
    refuse_tenant,
    takes_place,
)
from turnwise.types import DEFAULT_POLICY_NAME, LOCAL_KEY_NAME, Json, utc_now, values_of

KEY_COLUMNS = (
    *("key_id", "tenant", "role", "name", "created_at", "last_used_at", "expires_at", "revoked_at"),
    *("policy", "token_budget", "tokens_used"),
)

CREATED = ("key_id", "key", "tenant", "role", "name", "policy", "expires_at", "token_budget")
SECONDS_A_DAY = 86_400
FIRST_KEY = (
    "This is the first key: within 5 seconds the proxy refuses every call without a key, also of agents that run now, "
    "and no later command undoes that. Create it?"
)
REFUSED = "no key is created; answer y, or pass --yes"


@click.group("keys")
def keys() -> None:
    """Create, list and revoke API keys."""


@keys.command("create")
@click.option("--role", type=click.Choice(["agent", "trainer", "admin"]), default="agent", show_default=True)
@click.option("--tenant", help="Tenant whose data the key reaches [default: default; over HTTP the caller's].")
@click.option("--name", default="", help="What it is for.")
@click.option("--expires-days", type=click.FloatRange(min=0, min_open=True), help="Days that it is accepted for.")
@click.option("--token-budget", type=click.IntRange(min=1), help="Prompt and sampled tokens that its calls may use.")
@click.option("--policy", default=DEFAULT_POLICY_NAME, show_default=True, help="Policy that its calls sample with.")
@click.option("--yes", is_flag=True, help="Do not ask before the first key, which locks out agents without one.")
@takes_place
@json_option
def keys_create(
    role: str,
    tenant: str | None,
    name: str,
    expires_days: float | None,
    token_budget: int | None,
    policy: str,
    place: DataPlace,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Create a key. It is printed once and stored as a hash. The first one is asked about where there are sessions."""
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            stored = client.keys()
            is_first = all(key["name"] == LOCAL_KEY_NAME for key in stored)
            if not yes and is_first and next(client.sessions(), None) is not None:
                confirm(FIRST_KEY, REFUSED)
            lifetime = None if expires_days is None else max(1, round(SECONDS_A_DAY * expires_days))
            limits = given({"expires_in_seconds": lifetime, "token_budget": token_budget})
            created = client.create_key(role=role, name=name, policy=policy, **limits)
            print_records({field: created[field] for field in CREATED}, as_json=as_json)
            return
    from turnwise.store import keys as stored_keys
    from turnwise.store import sessions
    from turnwise.store.selection import SessionFilter

    expires_at = None if expires_days is None else utc_now() + dt.timedelta(days=expires_days)
    with place.store(creates=True) as store:
        with store.read() as conn:
            locks_out = not stored_keys.any_keys(conn) and sessions.list_sessions(conn, SessionFilter(), limit=1)[0]
        if locks_out and not yes:
            confirm(FIRST_KEY, REFUSED)
        with store.write() as conn:
            key_id, key = stored_keys.create_key(
                conn,
                tenant or "default",
                stored_keys.KeyRole(role),
                name,
                expires_at=expires_at,
                token_budget=token_budget,
                policy=policy,
            )
    made = (key_id, key, tenant or "default", role, name, policy, expires_at and expires_at.isoformat(), token_budget)
    print_records(dict(zip(CREATED, made, strict=True)), as_json=as_json)


@keys.command("list")
@click.option("--tenant", help="Only this tenant's.")
@takes_place
@json_option
def keys_list(tenant: str | None, place: DataPlace, *, as_json: bool) -> None:
    """List the keys, revoked ones included."""
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            print_stored(client.keys(), "keys", client.base_url, as_json=as_json, columns=KEY_COLUMNS)
            return
    from turnwise.store import extensions
    from turnwise.store import keys as stored_keys

    with place.store() as store, store.read() as conn:
        columns = extensions.read_columns(conn, "key", tenant)
        found = [columns.add(values_of(key), key.key_id) for key in stored_keys.list_keys(conn, tenant)]
    print_stored(found, "keys", place.database_url, as_json=as_json, columns=KEY_COLUMNS)


@keys.command("revoke")
@click.argument("key_id")
@takes_place
@json_option
def keys_revoke(key_id: str, place: DataPlace, *, as_json: bool) -> None:
    """Revoke a key: it is refused from now on."""
    with place.client() as client:
        revoked = _revoke(place, key_id) if client is None else client.revoke_key(key_id)
    print_records(revoked, as_json=as_json, columns=("key_id", "tenant", "role", "name", "revoked_at"))


@keys.command("budget")
@click.argument("key_id")
@click.argument("tokens", type=click.IntRange(min=1))
@database_option
@json_option
def keys_budget(key_id: str, tokens: int, database: str | None, *, as_json: bool) -> None:
    """Set the prompt and sampled tokens that a key's calls may use; running proxies follow within 5 seconds."""
    from turnwise.features import limits

    with opened(database_url(database), creates=False) as store, store.write() as conn:
        changed = values_of(limits.set_budget(conn, key_id, tokens))
    print_records(changed, as_json=as_json, columns=("key_id", "tenant", "role", "name", "token_budget"))


def _revoke(place: DataPlace, key_id: str) -> Json:
    from turnwise.store import keys as stored_keys

    with place.store() as store, store.write() as conn:
        revoked: Json = values_of(stored_keys.revoke_key(conn, key_id))
    return revoked
