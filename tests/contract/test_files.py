"""Files that hold secrets, or what users wrote, are their owner's alone; where others can read one, it is said."""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.commands import invoke

from proxy.features.tracing.observers import AccessLog
from turnwise.exchange.parquet import write_rows
from turnwise.features import copying
from turnwise.files import append_lines, write_whole
from turnwise.processes import limited
from turnwise.settings import is_readable_by_others, load_settings
from turnwise.store.database import Database, readable_files


@pytest.fixture(autouse=True)
def _usual_mask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that everybody may enter; those of pytest are closed."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def others(path: Path) -> list[Path]:
    """Return the files below a path that somebody besides their owner may read or write."""
    return [file for file in path.rglob("*") if file.is_file() and file.stat().st_mode & 0o077]


def test_a_database_its_log_and_its_backup_are_the_owners_alone(tmp_path):
    with contextlib.closing(Database(f"sqlite:///{tmp_path}/own.db")) as database:
        database.upgrade()
        copying.back_up(database, tmp_path / "backup.db")
        assert {file.name for file in tmp_path.iterdir()} >= {"own.db", "own.db-wal", "own.db-shm", "backup.db"}
        assert others(tmp_path) == []


async def test_logs_exports_and_lists_are_the_owners_alone(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    write_whole(tmp_path / "whole", "text")
    append_lines(tmp_path / "lines", ["one"])
    write_rows(tmp_path / "rows.parquet", {"a": pyarrow.int64()}, [{"a": 1}])
    log = AccessLog(tmp_path / "access.log", lambda: None)
    log.write({"path": "/"})
    log.close()
    argv = [sys.executable, "-c", "print(1)"]
    await limited.run_limited(
        argv, cwd=tmp_path, environment=os.environ, log=tmp_path / "agent.log", timeout_seconds=60
    )
    assert len(list(tmp_path.iterdir())) == 5
    assert others(tmp_path) == []


def test_the_settings_that_init_writes_are_the_owners_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke("init").exit_code == 0
    assert (tmp_path / "turnwise.toml").is_file()
    assert others(tmp_path) == []


def test_a_file_that_exists_keeps_its_permissions(tmp_path):
    """Its owner has chosen them."""
    path = tmp_path / "lines"
    path.touch(mode=0o644)
    append_lines(path, ["one"])
    assert path.stat().st_mode & 0o777 == 0o644


def test_a_file_is_in_reach_of_others_if_they_may_read_it_and_enter_its_directories(open_directory):
    file = open_directory / "inner" / "own.db"
    file.parent.mkdir()
    file.touch(mode=0o644)
    assert is_readable_by_others(file)
    assert readable_files(f"sqlite:///{file}") == [file]
    assert readable_files("postgresql://host/name") == []
    file.chmod(0o640)
    assert not is_readable_by_others(file)
    file.chmod(0o644)
    file.parent.chmod(0o700)
    assert not is_readable_by_others(file)
    assert not is_readable_by_others(file.with_name("missing"))


@pytest.mark.parametrize(
    ("text", "mode", "warns"),
    [
        ('[proxy]\nsecret = "s"\n', 0o644, True),
        ('[proxy]\nengine_api_key = "s"\n', 0o604, True),
        ('[proxy]\nsecret = "s"\n', 0o600, False),
        ("[proxy]\nport = 1\n", 0o644, False),
    ],
)
def test_settings_with_a_secret_that_others_can_read_are_named(open_directory, caplog, text, mode, warns):
    file = open_directory / "turnwise.toml"
    file.write_text(text)
    file.chmod(mode)
    from proxy.features import Settings

    with caplog.at_level(logging.WARNING):
        load_settings(Settings, config=file, section="proxy", overrides={})
    assert (f"chmod 600 {file}" in caplog.text) is warns
