"""Commands over HTTP: a developer has the proxy's address and a key, an operator has the database.

`--url`, or `TURNWISE_URL`, names the proxy; `--database` on the command line goes before the variable. A key reads its
own tenant.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import click

from turnwise.client import Client
from turnwise.commands.filters import NAMES
from turnwise.commands.location import KEY_VARIABLE, URL_VARIABLE
from turnwise.errors import SettingsError
from turnwise.types import Json


def proxy_options(command: Any) -> Any:
    """Add the options that name a proxy."""
    for option in (
        click.option("--url", envvar=URL_VARIABLE, help=f"Use this proxy over HTTP [default: ${URL_VARIABLE}]."),
        click.option("--api-key", envvar=KEY_VARIABLE, help=f"Key for --url [default: ${KEY_VARIABLE}]."),
    ):
        command = option(command)
    return command


@contextlib.contextmanager
def remote(url: str | None, api_key: str | None, database: str | None) -> Iterator[Client | None]:
    """Yield a client of the proxy that the options name; None where they mean the database.

    Raises:
        SettingsError: `--url` and `--database` are both on the command line.
    """
    if url is None or database is not None:
        source = click.get_current_context().get_parameter_source("url")
        if url is not None and source is click.core.ParameterSource.COMMANDLINE:
            raise SettingsError("give --url or --database, not both")
        yield None
        return
    with Client(url, api_key) as client:
        yield client


def api_filters(chosen: dict[str, Any]) -> Json:
    """Return the filters of the API for a command's options, and remove them from `chosen`.

    Raises:
        SettingsError: another tenant is asked for.
    """
    found = {name: chosen.pop(name) for name in NAMES}
    refuse_tenant(found.pop("tenant"))
    return {name: value for name, value in found.items() if value is not None}


def refuse_tenant(tenant: str | None) -> None:
    """Refuse the option `--tenant` over HTTP.

    Raises:
        SettingsError: a tenant is asked for.
    """
    if tenant is not None:
        raise SettingsError("--tenant needs the database: over HTTP a key reads its own tenant")


def sessions_of(client: Client, filters: Json) -> Iterator[Json]:
    """Yield the sessions that filters select, newest first."""
    session_id = filters.get("session_id")
    if session_id is None:
        yield from client.sessions(**filters)
        return
    session = client.session(session_id)
    if all(session.get(name) == value for name, value in filters.items() if name not in ("label", "metadata")):
        yield session


def session_document(client: Client, session: Json) -> Json:
    """Return a session with its turns and rewards, as `turnwise.exchange.session_document` does."""
    turns = [turn | client.turn(turn["turn_id"], prompt="whole") for turn in client.turns(session["session_id"])]
    whole = client.session(session["session_id"])["rewards"]
    given = {line["reward_id"]: line for line in (*whole, *(line for turn in turns for line in turn["rewards"]))}
    # The latest line of each target and name is in force; the lines of a step are with each of its turns.
    latest = {(line["turn_id"], line["step"], line["name"]): line for _, line in sorted(given.items())}
    lines = sorted(latest.values(), key=lambda line: int(line["reward_id"]))
    return {**session, "turns": turns, "rewards": lines}
