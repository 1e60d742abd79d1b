"""Commands about stored sessions: `sessions` lists and searches them; `prune` and `forget` remove some."""

from __future__ import annotations

import datetime as dt
import itertools
from typing import TYPE_CHECKING, Any

import click

from turnwise.commands.features.lineage import followed, print_deletion, then_option
from turnwise.commands.features.session_filter import api_filters, filter_of, filter_options, sessions_of
from turnwise.commands.output import confirm, print_stored
from turnwise.commands.place import (
    DataPlace,
    database_option,
    database_url,
    json_option,
    opened,
    takes_place,
)
from turnwise.errors import NotFound
from turnwise.types import Json, utc_now, values_of

if TYPE_CHECKING:
    from turnwise.store.database import Database

COLUMNS = (
    "session_id",
    "tenant",
    "policy",
    "status",
    "split",
    "task_id",
    "run",
    "num_turns",
    "num_chains",
    "reward",
    "created_at",
)


@click.group("sessions", invoke_without_command=True)
@filter_options
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@takes_place
@json_option
@click.pass_context
def sessions(context: click.Context, /, place: DataPlace, limit: int, *, as_json: bool, **chosen: Any) -> None:
    """List the newest sessions."""
    if context.invoked_subcommand is not None:
        return
    with place.client() as client:
        if client is not None:
            at_proxy = list(itertools.islice(sessions_of(client, api_filters(chosen)), limit))
            _print_sessions(at_proxy, limit, client.base_url, as_json=as_json)
            return
    from turnwise.store import extensions, policies
    from turnwise.store import sessions as stored_sessions

    with place.store() as store, store.read() as conn:
        names = policies.names_of_policies(conn)
        listed = stored_sessions.list_sessions(conn, filter_of(chosen), limit=limit)[0]
        ids = [each.session_id for each in listed]
        tenants = {each.tenant for each in listed}
        columns = {tenant: extensions.read_columns(conn, "session", tenant, ids) for tenant in tenants}
        found = [
            columns[each.tenant].add(values_of(each) | {"policy": names[each.policy_id]}, each.session_id)
            for each in listed
        ]
    _print_sessions(found, limit, place.database_url, as_json=as_json)


def _print_sessions(found: list[Json], limit: int, place: str, *, as_json: bool) -> None:
    print_stored(found, "matching sessions", place, as_json=as_json, columns=COLUMNS)
    if len(found) == limit and not as_json:
        click.echo(f"these are the newest {limit}; --limit shows more", err=True)


@click.command("prune")
@click.option(
    "--older-than-days", type=click.FloatRange(min=0), required=True, help="Age of the last activity, in days."
)
@database_option
@json_option
def prune(older_than_days: float, database: str | None, *, as_json: bool) -> None:
    """Delete sessions that have been over for this long, with turns and rewards; what waits for training stays."""
    from turnwise.features import retention

    before = utc_now() - dt.timedelta(days=older_than_days)
    with opened(database_url(database), creates=False) as store:
        deleted = retention.delete_all(store, lambda conn: retention.prune(conn, before))
        finished = retention.finish(store, deleted)
    print_deletion(finished, as_json=as_json)


@click.command("forget")
@click.option("--tenant", help="Whose sessions [default: default; required to delete everything of a tenant].")
@click.option("--session-id", help="Only this session; by default everything of the tenant, its keys included.")
@click.option("--user-id", help="Only the sessions of this end user.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@then_option
@database_option
@json_option
def forget(
    tenant: str | None,
    session_id: str | None,
    user_id: str | None,
    then: str | None,
    database: str | None,
    *,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete a session, an end user's sessions or a tenant for good.

    It names the policy versions that were trained on it, and the served ones that it shaped; `--then` says what becomes
    of policies that serve one. It asks first, and fails where there is nothing to delete.
    """
    if session_id is not None and user_id is not None:
        raise click.UsageError("give either --session-id or --user-id")
    if tenant is None and session_id is None and user_id is None:
        raise click.UsageError("give --session-id or --user-id, or --tenant to delete everything of a tenant")
    tenant = tenant or "default"
    from turnwise.features import retention
    from turnwise.store.selection import SessionFilter

    with opened(database_url(database), creates=False) as store:
        found = _contents(store, tenant, session_id, user_id)
        if not yes:
            confirm(f"Delete {found} for good?", f"not deleted: {found}; answer y, or pass --yes")
        if user_id is not None:
            of_user = SessionFilter(tenant=tenant, user_id=user_id)
            deleted = retention.delete_all(store, lambda conn: retention.delete_sessions(conn, of_user))
        elif session_id is None:
            deleted = retention.delete_all(store, lambda conn: retention.delete_tenant(conn, tenant))
        else:
            deleted = retention.delete_all(store, lambda conn: retention.delete_session(conn, tenant, session_id))
        finished = followed(store, deleted, then, asks=not yes and not as_json)
    print_deletion(finished, as_json=as_json)


def _contents(store: Database, tenant: str, session_id: str | None, user_id: str | None) -> str:
    from turnwise.features import records
    from turnwise.store import keys
    from turnwise.store.selection import SessionFilter

    with store.read() as conn:
        num_sessions = records.count_sessions(
            conn, SessionFilter(tenant=tenant, session_id=session_id, user_id=user_id)
        )
        num_keys = len(keys.list_keys(conn, tenant)) if session_id is None and user_id is None else 0
        tenants = sorted({key.tenant for key in keys.list_keys(conn, None)})
    if session_id is not None and not num_sessions:
        raise NotFound(f"tenant {tenant!r} has no session {session_id!r}; `turnwise sessions` lists them")
    if user_id is not None:
        if not num_sessions:
            raise NotFound(f"tenant {tenant!r} has no session of user {user_id!r}; nothing is deleted")
        return f"all {num_sessions} sessions of user {user_id!r} of tenant {tenant!r}"
    if not num_sessions and not num_keys:
        known = f"; tenants with keys are {', '.join(map(repr, tenants))}" if tenants else ""
        raise NotFound(f"tenant {tenant!r} has no session and no key: nothing is deleted{known}")
    if session_id is not None:
        return f"session {session_id!r} of tenant {tenant!r}"
    return f"all {num_sessions} sessions and {num_keys} keys of tenant {tenant!r}"
