"""By which options commands choose stored sessions, in the database and over HTTP alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from turnwise.client import Client
from turnwise.commands.place import refuse_tenant
from turnwise.types import Json

if TYPE_CHECKING:
    from turnwise.store.selection import SessionFilter


FILTERS = ("tenant", "task_id", "group_id", "session_id", "split", "status", "user_id", "label", "policy", "metadata")


def filter_options(command: Any) -> Any:
    for option in (
        click.option("--tenant", help="Only this tenant's."),
        click.option("--task-id", help="Only of this task."),
        click.option("--group-id", help="Only of this group."),
        click.option("--session-id", help="Only this session."),
        click.option("--split", type=click.Choice(["train", "eval"])),
        click.option("--status", type=click.Choice(["open", "ended", "expired"])),
        click.option("--user-id", help="Only of this end user."),
        click.option("--metadata", metavar="KEY=VALUE", help="Only with this pair in the metadata."),
        click.option("--label", help="Only with this label."),
        click.option("--policy", help="Only of the policy of this name."),
    ):
        command = option(command)
    return command


def filter_of(given: dict[str, Any]) -> SessionFilter:
    """Return the filter of a command's options, and remove them from `given`."""
    from turnwise.store.selection import SessionFilter
    from turnwise.types import SessionStatus, Split

    kinds: dict[str, Callable[[str], Any]] = {"split": Split, "status": SessionStatus}
    chosen = {name: given.pop(name) for name in FILTERS}
    found: dict[str, Any] = {name: kinds.get(name, str)(value) for name, value in chosen.items() if value is not None}
    return SessionFilter(**found)


def api_filters(chosen: dict[str, Any]) -> Json:
    """Return the filters of the API for a command's options, and remove them from `chosen`."""
    found = {name: chosen.pop(name) for name in FILTERS}
    refuse_tenant(found.pop("tenant"))
    return {name: value for name, value in found.items() if value is not None}


def sessions_of(client: Client, filters: Json) -> Iterator[Json]:
    session_id = filters.get("session_id")
    if session_id is None:
        yield from client.sessions(**filters)
        return
    session = client.session(session_id)
    if all(session.get(name) == value for name, value in filters.items() if name not in ("label", "metadata")):
        yield session
