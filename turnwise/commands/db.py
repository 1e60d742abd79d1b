"""`turnwise db`: the tables, backups, and the secrets of a container deployment.

A secret is a file that appears whole, under its final permissions, and only once: a restart changes no secret, and no
process reads a half-written one.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from pathlib import Path

import click

from turnwise.commands.output import print_records
from turnwise.commands.place import database_option, database_url, json_option
from turnwise.errors import SettingsError
from turnwise.settings import mask_credentials

PASSWORD_FILE = "database-password"  # noqa: S105  a name
"""Readable to its owner and group: the database's server reads it."""
PASSFILE = "pgpass"
"""The password as libpq's clients read it; readable to its owner alone, or libpq ignores it."""
SERVER_MODE, OWNER_MODE = 0o640, 0o600


def make_database_password(directory: Path, *, host: str, port: int, database: str, user: str) -> bool:
    """Write a random password for the server and for clients unless one is there; return whether it is new."""
    password_file, passfile = directory / PASSWORD_FILE, directory / PASSFILE
    is_new = not password_file.exists()
    if is_new:
        write_secret(password_file, secrets.token_hex(32), SERVER_MODE)
    password = password_file.read_text(encoding="utf-8").strip()
    if not passfile.exists():
        write_secret(passfile, f"{host}:{port}:{database}:{user}:{password}\n", OWNER_MODE)
    return is_new


def write_secret(file: Path, text: str, mode: int) -> None:
    """Write a secret's file with its permissions; leave an existing one as it is."""
    try:
        write_once(file, text, mode)
    except OSError as error:
        raise SettingsError(f"cannot write {str(file)!r}: {error.strerror}; name a writable directory") from error


def write_once(path: Path, text: str, mode: int) -> None:
    """Write a file atomically and durably, with its permissions; leave an existing one as it is."""
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        staged.chmod(mode)
        with contextlib.suppress(FileExistsError):
            path.hardlink_to(staged)
    finally:
        staged.unlink(missing_ok=True)


@click.group("db")
def db() -> None:
    """Manage the database."""


@db.command("upgrade")
@click.option(
    "--admin-key-file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Create an admin key where there is no key yet: the one in this file, such as a mounted secret, or else a new "
    "one, which is printed once and written to this file, for its owner alone.",
)
@database_option
@json_option
def db_upgrade(database: str | None, admin_key_file: Path | None, *, as_json: bool) -> None:
    """Bring the tables to this release; safe to repeat, and to run from several machines at once."""
    from turnwise.commands.place import opened

    url = database_url(database)
    with opened(url, make_ready=False) as store:
        store.upgrade()
    click.echo(json.dumps({"upgraded": True}) if as_json else "Database is up to date.")
    if admin_key_file is not None and (key := _create_first_key(url, admin_key_file)) is not None:
        click.echo(f"First admin key, shown once and kept in {admin_key_file}: {key}")


@db.command("make-password")
@click.argument("directory", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--host", default="postgres", show_default=True, help="Host of the database.")
@click.option("--port", type=click.IntRange(1, 65535), default=5432, show_default=True, help="Port of the database.")
@click.option("--name", default="turnwise", show_default=True, help="Name of the database.")
@click.option("--user", default="turnwise", show_default=True, help="User of the database.")
def db_make_password(directory: Path, host: str, port: int, name: str, user: str) -> None:
    """Write a random database password into a directory, for the server and for clients; keep an existing one."""
    is_new = make_database_password(directory, host=host, port=port, database=name, user=user)
    click.echo(f"wrote a new password to {directory}" if is_new else f"{directory} has a password already")


@db.command("backup")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@database_option
@json_option
def db_backup(file: Path, database: str | None, *, as_json: bool) -> None:
    """Copy an SQLite database to a new file, consistently, while agents and trainer use it."""
    from turnwise.commands.place import opened
    from turnwise.features import copying

    with opened(database_url(database), make_ready=False, creates=False) as store:
        copying.back_up(store, file)
    print_records({"backup": str(file), "num_bytes": file.stat().st_size}, as_json=as_json)


@db.command("copy")
@click.option("--from", "source", metavar="URL", required=True, help="SQLAlchemy URL of the database to read.")
@click.option("--to", "target", metavar="URL", required=True, help="SQLAlchemy URL of an empty database.")
@json_option
def db_copy(source: str, target: str, *, as_json: bool) -> None:
    """Copy a whole database into another one, such as SQLite to PostgreSQL, and compare all rows.

    Stop the proxies and the trainer first. A copy that was interrupted is repeated with the same command.
    """
    _copy(source, target, as_json=as_json, is_released=True)


@db.command("import-unreleased")
@click.argument("source", metavar="OLD")
@database_option
@json_option
def db_import_unreleased(source: str, database: str | None, *, as_json: bool) -> None:
    """Copy OLD, the URL of a database of a commit before 0.2, with everything in it into an empty one, and compare.

    Stop the proxies and the trainer first. OLD stays as it is; a copy that was interrupted is repeated.
    """
    _copy(source, database_url(database), as_json=as_json, is_released=False)


def _copy(source: str, target: str, *, as_json: bool, is_released: bool) -> None:
    from turnwise.commands.place import opened
    from turnwise.features import copying

    if source == target:
        raise SettingsError(f"{mask_credentials(source)!r} is both the database to read and the one to write")

    def note(table: str, count: int) -> None:
        if not as_json:
            click.echo(f"{table}: {count} rows, the same in both")

    read = copying.portions if is_released else copying.portions_of_unreleased
    with (
        opened(source, creates=False, make_ready=is_released) as reading,
        opened(target, make_ready=False) as writing,
    ):
        writing.upgrade()
        counts = copying.copy_all(reading, writing, note, read)
    if as_json:
        click.echo(json.dumps(counts))


def _create_first_key(url: str, file: Path) -> str | None:
    """Create an admin key where there is no key yet: the one in the file, or else a new one, which is written to it.

    Returns:
        The new key; None where there are keys, or where the file had it.
    """
    from turnwise.commands.place import opened
    from turnwise.store import keys

    try:
        given = file.read_text().strip()
    except FileNotFoundError:
        given = None
    except OSError as error:
        raise SettingsError(f"the key in {file} cannot be read: {error.strerror}") from error
    with opened(url) as database, database.write() as conn:
        if keys.any_keys(conn):
            return None
        _, key = keys.create_key(conn, "default", keys.KeyRole("admin"), "first admin key", key=given)
        # A start that is killed before its commit leaves a file, and the next one creates the key in it.
        if given is None:
            write_secret(file, f"{key}\n", OWNER_MODE)
    return None if given is not None else key
