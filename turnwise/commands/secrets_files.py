"""Secrets of a container deployment: the database's password and the first admin key, each in its own file.

A file appears whole, under its final permissions, and only once: a restart changes no secret, and no process reads a
half-written one.
"""

from __future__ import annotations

import secrets
from pathlib import Path

from turnwise.errors import SettingsError
from turnwise.files import write_once

PASSWORD_FILE = "database-password"  # noqa: S105  a name
"""Readable to its owner and group: the database's server reads it."""
PASSFILE = "pgpass"
"""The same password as libpq's clients read it; readable to its owner alone, or libpq ignores it."""
SERVER_MODE, OWNER_MODE = 0o640, 0o600


def make_database_password(directory: Path, *, host: str, port: int, database: str, user: str) -> bool:
    """Write a random password for the server and for clients unless one is there; return whether it is new.

    Raises:
        SettingsError: the directory cannot be written.
    """
    password_file, passfile = directory / PASSWORD_FILE, directory / PASSFILE
    is_new = not password_file.exists()
    if is_new:
        write_secret(password_file, secrets.token_hex(32), SERVER_MODE)
    password = password_file.read_text(encoding="utf-8").strip()
    if not passfile.exists():
        write_secret(passfile, f"{host}:{port}:{database}:{user}:{password}\n", OWNER_MODE)
    return is_new


def write_secret(file: Path, text: str, mode: int) -> None:
    """Write a secret's file with its permissions; leave an existing one as it is.

    Raises:
        SettingsError: the directory cannot be written.
    """
    try:
        write_once(file, text, mode)
    except OSError as error:
        raise SettingsError(f"cannot write {str(file)!r}: {error.strerror}; name a writable directory") from error
