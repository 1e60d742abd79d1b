"""`policies lineage`, which names what shaped a version, and what `forget` does with policies that it leaves shaped."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from turnwise.client import Client, wire
from turnwise.commands.output import print_records
from turnwise.commands.place import DataPlace, json_option, refuse_tenant, takes_place
from turnwise.errors import SettingsError
from turnwise.types import Json, values_of
from turnwise.version_directory import file_digest, read_json

if TYPE_CHECKING:
    from turnwise.features.retention import Deleted, Deletion
    from turnwise.store.database import Database

_VERSIONS = ("version", "policy", "update_id", "num_sessions", "num_named")
_SESSIONS = ("session_id", "tenant", "how", "versions", "user_id", "key_id", "imported")
_LISTS = ("versions", "users", "keys", "imports", "sessions")
then_option = click.option(
    "--then",
    type=click.Choice(["nothing", "rollback", "drop"]),
    help="What follows for policies that serve a version which the deleted sessions shaped: `rollback` to the last "
    "clean version, or `drop` the policy [default: asks, and `nothing` with --yes].",
)


class _Client(Client):
    """Reads lineages over HTTP."""

    def lineage(self, named: str, limit: int) -> Json:
        name, _, version = named.partition("@")
        asked: Json = {"limit": limit} | ({"version": version} if version else {})
        found = self._json(wire.get(f"/v1/policies/{quote(name)}/lineage", **asked))
        return {**found, "sessions": found["data"]}


@click.command("lineage")
@click.argument("policy", metavar="POLICY[@VERSION]")
@click.option("--tenant", help="Whose policy, and only this tenant's sessions [default: the sessions of all].")
@click.option("--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="Sessions to name.")
@click.option(
    "--check",
    "directory",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Check the signed manifest in a copy of the version's directory, and its weights.",
)
@takes_place
@json_option
def lineage(
    policy: str, tenant: str | None, limit: int, directory: Path | None, place: DataPlace, *, as_json: bool
) -> None:
    """Name the sessions, end users, keys and imports that shaped the served or the named version of a policy."""
    with place.client() as client:
        if client is not None:
            refuse_tenant(tenant)
            with _Client(client.base_url, client.api_key) as reader:
                _print(reader.lineage(policy, limit), as_json=as_json)
            return
    from turnwise.features.lineage import versions

    with place.store() as store, store.read() as conn:
        if directory is not None:
            document = read_json(directory / "lineage.json")
            if not versions.is_signed(conn, document["manifest"], document["signature"]):
                raise SettingsError(f"{str(directory)!r} has a manifest that this database did not sign")
            for name, digest in document["manifest"]["weights"].items():
                if not (directory / name).is_file() or file_digest(directory / name) != digest:
                    raise SettingsError(f"{str(directory / name)!r} is not what the manifest names by its SHA-256")
            click.echo(f"This database signed the manifest of version {document['manifest']['version']}.")
            return
        found = versions.lineage(conn, tenant, policy)
        sessions, has_more = versions.lineage_sessions(conn, tenant, policy, limit=limit)
    _print(values_of(found) | {"sessions": values_of(sessions), "has_more": has_more}, as_json=as_json)


def _print(found: Json, *, as_json: bool) -> None:
    if as_json:
        print_records(found, as_json=True)
        return
    for name in _LISTS:
        if found[name]:
            columns = {"versions": _VERSIONS, "sessions": _SESSIONS}.get(name, ("name", "num_sessions"))
            click.echo(f"{name}:")
            print_records(found[name], as_json=False, columns=columns)
    click.echo(
        f"{found['num_sessions']} sessions shaped version {found['version']} of policy {found['policy']}; "
        f"{found['num_unnamed']} more are deleted or of another tenant, counted once a version."
    )
    if not found["is_complete"]:
        click.echo("Not all is known: a version was published by hand, or made by another project's trainer.")
    if found["is_signed"] is not None:
        click.echo(f"Its manifest {'is signed' if found['is_signed'] else 'WAS CHANGED: its signature is wrong'}.")


def followed(store: Database, deleted: Deleted, then: str | None, *, asks: bool) -> Deletion:
    """Return what a deletion removed and left, after what was chosen for the policies that it leaves shaped."""
    from turnwise.features import retention
    from turnwise.features.lineage import shaped

    found = shaped.shaped_policies(store, deleted.shaped_versions)
    if found and then is None and asks:
        for each in found:
            click.echo(
                f"Policy {each.policy} serves version {each.shaped_version}, which these sessions shaped; its last "
                f"clean version is {'none' if each.clean_version is None else each.clean_version}.",
                err=True,
            )
        choice = click.Choice([each.value for each in shaped.Then])
        then = click.prompt("What follows?", type=choice, default=shaped.Then.NOTHING.value, err=True)
    done, dropped = [], []
    for each in found:
        with store.write() as conn:
            policy, gone = shaped.follow(conn, each, shaped.Then(then or shaped.Then.NOTHING))
        done.append(policy)
        dropped += gone
    return retention.finish(store, deleted, done, dropped)


def print_deletion(finished: Deletion, *, as_json: bool) -> None:
    print_records(json.loads(json.dumps(dataclasses.asdict(finished))), as_json=as_json)
