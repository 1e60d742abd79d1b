"""An archive of sessions that are over: a directory of batches, each with one Parquet file for every table.

A batch is complete before its sessions leave the tables: it is written under another name, synchronised and renamed. So
a crash at any instant loses nothing; it may leave sessions both in a batch and in the tables, and an incomplete batch,
which a run removes once it is an hour old. Of a session in several batches the last one counts.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from turnwise.errors import Conflict, InvalidRequest
from turnwise.exchange.parquet import write_rows
from turnwise.features import archive as stored_archive
from turnwise.features import retention
from turnwise.files import lock, synchronise
from turnwise.store import versions
from turnwise.store.database import Database
from turnwise.types import utc_now

SESSIONS_AT_ONCE = 50


_INCOMPLETE = ".writing-"
_ABANDONED_SECONDS = 3600.0
"""An incomplete batch to which nothing was written for this long belongs to no running process."""
_LOCK_FILE = ".lock"


def archive(database: Database, directory: Path, before: datetime.datetime) -> retention.Deleted:
    """Move the sessions that were over before an instant, and that no trainer waits for, from the tables to an archive.

    Returns:
        What left the tables.

    Raises:
        Conflict: another process writes to this archive.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        _remove_abandoned(directory)
        return _move(database, directory, before)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    try:
        file = lock(directory / _LOCK_FILE)
    except BlockingIOError as error:
        raise Conflict(
            f"another `turnwise archive` writes to {str(directory)!r}; wait for it, or name another directory"
        ) from error
    with file:
        yield


def _remove_abandoned(directory: Path) -> None:
    oldest = time.time() - _ABANDONED_SECONDS
    for incomplete in directory.glob(f"{_INCOMPLETE}*"):
        if max(path.stat().st_mtime for path in (incomplete, *incomplete.iterdir())) < oldest:
            shutil.rmtree(incomplete)


def _move(database: Database, directory: Path, before: datetime.datetime) -> retention.Deleted:
    total, last = retention.Deleted(), None
    while True:
        with database.read() as conn:
            found = retention.over_since(conn, before, after=last, limit=SESSIONS_AT_ONCE)
            if not found:
                return total
            _write_batch(
                directory, {name: stored_archive.select_rows(conn, name, found) for name in stored_archive.tables()}
            )
        last = found[-1]
        total += retention.delete_all(database, functools.partial(retention.delete_unchanged, read=found))


def restore(database: Database, directory: Path) -> int:
    """Store all sessions of an archive again that are not stored; return how many. The archive stays as it is.

    In another database than theirs, the versions and updates that they name are unknown; new ones get higher numbers.

    Raises:
        InvalidRequest: the directory holds no archive.
    """
    batches = sorted(directory.glob("batch-*"))
    if not batches:
        raise InvalidRequest(
            f"{str(directory)!r} holds no archive; name a directory that `turnwise archive` has written"
        )
    last_batch = {name: batch for batch in batches for name in _sessions_in(batch)}
    count = 0
    for batch in batches:
        highest, read = 0, list(_read_batch(batch))
        with database.write() as conn:
            for archived in read:
                name = archived.session["tenant"], archived.session["session_id"]
                if last_batch[name] == batch and stored_archive.insert_session(conn, archived):
                    count, highest = count + 1, max(highest, _highest_version(archived))
            versions.reserve_numbers(conn, highest)
    return count


def _highest_version(archived: stored_archive.ArchivedSession) -> int:
    sampled = (row["policy_version_last"] for row in archived.others.get("turns", ()))
    trained = (row["policy_version"] for row in archived.others.get("trained_sessions", ()))
    return max((*sampled, *trained), default=0)


def _sessions_in(batch: Path) -> list[tuple[str, str]]:
    import pyarrow.parquet

    names = pyarrow.parquet.read_table(batch / "sessions.parquet", columns=["tenant", "session_id"])
    return list(zip(*names.to_pydict().values(), strict=True))


def _read_batch(batch: Path) -> Iterator[stored_archive.ArchivedSession]:
    import pyarrow.parquet

    paths = {name: batch / f"{name}.parquet" for name in stored_archive.tables()}
    return stored_archive.grouped(
        {
            name: pyarrow.parquet.read_table(path).to_pylist()
            for name, path in paths.items()
            if name not in stored_archive.later_tables() or path.exists()
        }
    )


def _write_batch(directory: Path, rows_of: dict[str, Iterator[stored_archive.Row]]) -> None:
    number = utc_now().strftime("%Y%m%dT%H%M%S%f")
    written = Path(tempfile.mkdtemp(prefix=_INCOMPLETE, dir=directory))
    for name, rows in rows_of.items():
        _write_table(written / f"{name}.parquet", name, rows)
    synchronise(written)
    batch = written.rename(directory / f"batch-{number}")
    synchronise(directory)
    _require_complete(batch)


def _require_complete(batch: Path) -> None:
    """Remove a batch that lacks a table's file, and raise: its sessions must stay in the tables."""
    missing = sorted(name for name in stored_archive.tables() if not (batch / f"{name}.parquet").exists())
    if missing:
        shutil.rmtree(batch)
        raise Conflict(
            f"another process removed the files of {missing} from {str(batch)!r}, and the batch's sessions stay in the "
            "tables; archive again when no other process writes to this directory"
        )


def _write_table(path: Path, table_name: str, rows: Iterable[stored_archive.Row]) -> None:
    import pyarrow

    kinds = {bytes: pyarrow.binary(), int: pyarrow.int64(), float: pyarrow.float64(), str: pyarrow.string()}
    columns = {name: kinds[kind] for name, kind in stored_archive.columns_of(table_name).items()}
    write_rows(path, columns, rows)
    synchronise(path)
