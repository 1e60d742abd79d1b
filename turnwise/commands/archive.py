"""`turnwise archive`: sessions that are over leave the tables for Parquet files, and come back."""

from __future__ import annotations

import datetime as dt
from importlib import import_module
from pathlib import Path

import click

from turnwise.commands.location import database_option, database_url, json_option
from turnwise.commands.output import print_records
from turnwise.types import utc_now


@click.command("archive")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--older-than-days", type=click.FloatRange(min=0), help="Age of the last activity, in days.")
@click.option("--restore", is_flag=True, help="Store the archive's sessions again; the archive stays as it is.")
@database_option
@json_option
def archive(
    directory: Path, older_than_days: float | None, database: str | None, *, restore: bool, as_json: bool
) -> None:
    """Move sessions that are over for so long to Parquet files in DIRECTORY; what waits for training stays."""
    if restore == (older_than_days is not None):
        raise click.UsageError("give either --older-than-days or --restore")
    archives, url = import_module("turnwise.exchange.archive"), database_url(database)
    with import_module("turnwise.commands.operate").opened(url) as store:
        if older_than_days is None:
            print_records({"restored_sessions": archives.restore(store, directory)}, as_json=as_json)
            return
        moved = archives.archive(store, directory, utc_now() - dt.timedelta(days=older_than_days))
    print_records({"archived_sessions": len(moved.sessions), "archived_turns": moved.num_turns}, as_json=as_json)
