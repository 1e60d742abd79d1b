"""Commands about the served model: `policies` with `activate`, `follow` and `merge`, and `updates`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import click

from turnwise.commands.location import database_option, database_url, json_option
from turnwise.commands.output import print_records, print_stored

_COLUMNS = ("version", "status", "pinned", "on_disk", "reward_mean", "reload_seconds", "created_at", "error")
_UPDATE_COLUMNS = ("update_id", "policy_version", "num_groups", "num_sessions", "num_tokens", "reward_mean", "seconds")


@click.group("policies", invoke_without_command=True)
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@database_option
@json_option
@click.pass_context
def policies(context: click.Context, limit: int, database: str | None, *, as_json: bool) -> None:
    """List the policy versions, newest first; `activate` and `follow` choose the served one."""
    if context.invoked_subcommand is None:
        url = database_url(database)
        listed = _versions().list_versions(url, limit=limit)
        print_stored(listed, "policy versions", url, as_json=as_json, columns=_COLUMNS)


@policies.command("activate")
@click.argument("version", type=click.IntRange(min=0))
@database_option
@json_option
def activate(version: int, database: str | None, *, as_json: bool) -> None:
    """Serve this version and stay on it (pin it) until `turnwise policies follow`."""
    pinned = _versions().pin_version(database_url(database), version)
    if as_json:
        print_records(pinned, as_json=True)
        return
    click.echo(f"Version {version} is pinned: the proxy loads it now and keeps it, whatever is published later.")


@policies.command("follow")
@database_option
@json_option
def follow(database: str | None, *, as_json: bool) -> None:
    """Serve the newest version again, and each later one."""
    newest = _versions().follow_newest(database_url(database))
    if as_json:
        print_records(newest, as_json=True)
        return
    version = newest["version"]
    click.echo(
        "No version is published yet." if version is None else f"The proxy follows the newest version: {version}."
    )


@policies.command("merge")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.argument("destination", type=click.Path(path_type=Path, file_okay=False))
@click.option("--model", help="Directory or Hub name of the base model [default: the one that the version names].")
@click.option("--push", "repository", help="Also upload the result to this repository of the Hugging Face Hub.")
@click.option("--public", is_flag=True, help="Create that repository public, not private.")
def merge(directory: Path, destination: Path, model: str | None, repository: str | None, *, public: bool) -> None:
    """Write a version of kind lora, policies/v000007, as a whole model: the adapter added to the base model."""
    merging = import_module("trainer.publish.merge")
    merging.merge_adapter(directory, destination, model=model)
    click.echo(f"The merged model is in {destination}.")
    if repository is not None:
        click.echo(f"Uploaded to {merging.push(destination, repository, is_private=not public)}.")


@click.command("updates")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True)
@database_option
@json_option
def updates(limit: int, database: str | None, *, as_json: bool) -> None:
    """List what was trained: each update with its version, its groups and its mean reward, newest first."""
    url = database_url(database)
    listed = _versions().list_updates(url, limit=limit)
    print_stored(listed, "updates", url, as_json=as_json, columns=_UPDATE_COLUMNS)


def _versions() -> Any:
    return import_module("turnwise.commands.operate_versions")
