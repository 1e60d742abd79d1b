"""The results of the one-shot services of docker-compose.yml: a password, a key and a model, each created once."""

from __future__ import annotations

import contextlib
from pathlib import Path

from support.commands import invoke

from turnwise.default_models import pretrained
from turnwise.store import keys
from turnwise.store.database import Database


def _mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def test_the_databases_password_is_created_once_for_server_and_clients(tmp_path: Path) -> None:
    assert invoke("db", "make-password", str(tmp_path)).exit_code == 0
    password = (tmp_path / "database-password").read_text()
    assert len(password) == 64
    assert (tmp_path / "pgpass").read_text() == f"postgres:5432:turnwise:turnwise:{password}\n"
    assert (_mode(tmp_path / "database-password"), _mode(tmp_path / "pgpass")) == (0o640, 0o600)
    again = invoke("db", "make-password", str(tmp_path))
    assert "has a password already" in again.output
    assert (tmp_path / "database-password").read_text() == password
    assert password not in again.output
    assert len(list(tmp_path.iterdir())) == 2


def test_a_start_that_was_killed_between_the_two_files_is_completed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "database-password").write_text("kept")
    invoke("db", "make-password", str(tmp_path), "--host", "db", "--user", "me", "--name", "mine", "--port", "1")
    assert (tmp_path / "pgpass").read_text() == "db:1:mine:me:kept\n"


def test_the_first_admin_key_is_created_once_printed_once_and_stored_for_its_owner(tmp_path: Path) -> None:
    file = tmp_path / "admin-key"
    upgrade = ["db", "upgrade", "--database", f"sqlite:///{tmp_path}/x.db", "--admin-key-file", str(file)]
    first = invoke(*upgrade)
    key = file.read_text().strip()
    assert key.startswith("tw-")
    assert first.output.count(key) == 1
    assert _mode(file) == 0o600
    second = invoke(*upgrade)
    assert (second.exit_code, "tw-" in second.output) == (0, False)
    assert file.read_text().strip() == key


def test_a_key_that_the_operator_chose_is_the_first_admin_key_and_is_not_printed(tmp_path: Path) -> None:
    """A mounted secret is known to the operator, so no log has to show it."""
    file, url = tmp_path / "admin-key", f"sqlite:///{tmp_path}/x.db"
    key = f"tw-{'0a' * 8}-{'b' * 64}"
    file.write_text(f"{key}\n")
    assert key not in invoke("db", "upgrade", "--database", url, "--admin-key-file", str(file)).output
    with contextlib.closing(Database(url)) as database, database.read() as conn:
        found = keys.verify_key(conn, key)
    assert found is not None
    assert found.role == keys.KeyRole("admin")


def test_a_file_with_something_else_than_a_key_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "admin-key"
    file.write_text("tw-short")
    upgrade = ["db", "upgrade", "--database", f"sqlite:///{tmp_path}/x.db", "--admin-key-file", str(file)]
    refused = invoke(*upgrade)
    assert refused.exit_code != 0
    assert "openssl rand" in refused.output


def test_a_directory_with_a_model_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert pretrained.write_pretrained(tmp_path) == tmp_path
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
