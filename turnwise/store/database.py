"""One connection pool to SQLite or PostgreSQL, with the transactions and the errors that both have.

Callers use two kinds of transaction, `write()` and `read()`, and handle two errors, `StoreUnavailable` and
`SchemaMismatch`; SQL that differs between the databases is in `statements`. SQLite runs in WAL mode with
`synchronous=FULL` and takes its write lock at BEGIN, so no write transaction fails later because the lock is taken. Its
own wait for that lock tries ten times a second, and often meets no pause of a busy writer in 5 s; `_once_free` tries
more often.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import contextvars
import datetime
import functools
import importlib.resources
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeAlias, TypeVar

import sqlalchemy as sa

from turnwise.errors import InvalidRequest, SchemaMismatch, SettingsError, StoreUnavailable, TurnwiseError
from turnwise.files import create_private
from turnwise.settings import is_readable_by_others
from turnwise.store.postgres import DeadlineConnection
from turnwise.store.rows import to_micros
from turnwise.store.schema import metadata, policies
from turnwise.store.statements import execute
from turnwise.types import DEFAULT_POLICY

if TYPE_CHECKING:  # alembic takes as long to import as SQLAlchemy, and most processes never migrate
    from alembic.config import Config

P = ParamSpec("P")
T = TypeVar("T")
Connection: TypeAlias = sa.Connection
"""An open transaction: the only SQLAlchemy type that callers outside of the store use."""

_MIGRATION_LOCK = 0x7475726E
_MIGRATION_SECONDS = 600
ANSWER_SECONDS = 30.0
"""Maximum time of a statement on PostgreSQL; migrations have no limit."""
GRACE_SECONDS = 2.0
QUEUE_SECONDS = 30.0
"""Longest wait of `Database.fetch` for its turn, while others' reads take all connections."""
LOCK_SECONDS = 0.001
"""Time between two attempts to get SQLite's write lock."""
_REFUSED = "Connection refused"
_LOGIN_REFUSED = re.compile(
    r"\w+ authentication failed for user \S+|no password supplied|(?:role|database) \S+ does not exist|no pg_hba.conf"
)
_PERMANENT = ("28", "3D000", "57014", "SQLITE_CORRUPT", "SQLITE_NOTADB", "SQLITE_READONLY")
"""Beginnings of SQLSTATEs and SQLite's error names: no login, no database, `statement_timeout`, or a broken file."""
_TOO_LONG = "54000"
"""PostgreSQL's error for a text in an index that has more than 2,704 bytes after compression."""
_IMPORT = "move everything in it with `turnwise db import-unreleased URL --database NEW`"
_MOVE = "{how} (docs/operations.md, Upgrades), or name another database with --database"
_DEFAULT_POLICY = sa.select(policies.c.policy_id).where(policies.c.policy_id == DEFAULT_POLICY)
FILE_ENDS = ("", "-wal", "-shm")
"""Ends of the names of SQLite's files: of the data, the write-ahead log and its index."""
MIN_CORRECTION = datetime.timedelta(seconds=1)
"""Difference of a clock to this process's own that counts as a correction."""
_NO_FILE = ("SQLITE_CANTOPEN", "SQLITE_READONLY")
_UNKNOWN_TABLE = ("no such table", "no such column", "has no column named", "UndefinedTable", "UndefinedColumn")


def missing_file(url: str) -> Path | None:
    """Return the SQLite file that a URL names, if it does not exist; else None."""
    parsed = _parsed(url)
    name = parsed.database if parsed.get_backend_name() == "sqlite" else None
    if name is None or name.startswith((":", "file:")) or Path(name).exists():
        return None
    return Path(name)


def readable_files(url: str) -> list[Path]:
    """Return the files of an SQLite database that users besides its owner and group can read."""
    parsed = _parsed(url)
    name = parsed.database if parsed.get_backend_name() == "sqlite" else None
    files = [] if name is None or name.startswith((":", "file:")) else [Path(f"{name}{end}") for end in FILE_ENDS]
    return [file for file in files if is_readable_by_others(file)]


class Database:
    """A pool of connections to one SQLite file or PostgreSQL database; safe to share between threads.

    Its methods raise `StoreUnavailable` where the database cannot be reached, is full, or is locked for too long, and
    `SchemaMismatch` where its tables are not those of this release; the message names the command to run.
    """

    def __init__(self, url: str, *, pool_size: int = 5, lock_timeout_seconds: float = 5.0) -> None:
        self._lock_timeout_seconds = lock_timeout_seconds
        parsed = _parsed(url)
        self.dialect = parsed.get_backend_name()
        """`sqlite` or `postgresql`."""
        make = _sqlite_engine if self.dialect == "sqlite" else _postgresql_engine
        self._engine = make(parsed, pool_size, lock_timeout_seconds)
        self._writer = self._engine.execution_options(writes=True)
        of_reads = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        self._reader = self._engine.execution_options(**({} if self.dialect == "sqlite" else of_reads))
        # SQLite allows one writer. Threads wait in a queue; only one of each process tries to get the file's lock.
        self._write_lock: threading.Lock | None = threading.Lock() if self.dialect == "sqlite" else None
        # Threads of its own, one a connection: a database that is silent takes no thread from other work.
        self._readers = ThreadPoolExecutor(pool_size, "store-read")

    @contextlib.contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """Open a write transaction: it is committed durably when the block ends, or rolled back if the block raises."""
        with self._serialised(), attributed(), self._writer.begin() as conn:
            yield conn

    @contextlib.contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a read-only transaction on one snapshot."""
        with attributed(), self._reader.connect() as conn:
            yield conn

    async def fetch(
        self, function: Callable[Concatenate[sa.Connection, P], T], *arguments: P.args, **options: P.kwargs
    ) -> T:
        """Return the result of a function that reads the store, called in a thread with a transaction of `read`.

        After a wait of `QUEUE_SECONDS` for others' reads the store counts as unavailable.
        """
        context, deadline = contextvars.copy_context(), time.monotonic() + QUEUE_SECONDS

        def call() -> T:
            if time.monotonic() > deadline:
                raise StoreUnavailable(
                    f"the database was busy with other reads for {QUEUE_SECONDS:g} s; check that it answers, and retry"
                )
            with self.read() as conn:
                return function(conn, *arguments, **options)

        return await asyncio.get_running_loop().run_in_executor(self._readers, context.run, call)

    def upgrade(self) -> None:
        """Migrate the tables to this release; concurrent migrations run one after the other."""
        if self._known_revision() == _head():
            return
        from alembic import command

        config = alembic_config()
        with self.write() as conn:
            if self.dialect == "postgresql":
                conn.exec_driver_sql(f"SET LOCAL lock_timeout = '{_MIGRATION_SECONDS}s'")
                conn.exec_driver_sql("SET LOCAL statement_timeout = 0")
                conn.connection.driver_connection.answer_seconds = None  # type: ignore[union-attr]
                conn.execute(sa.select(sa.func.pg_advisory_xact_lock(_MIGRATION_LOCK)))
            config.attributes["connection"] = conn
            command.upgrade(config, "head")

    def check_schema(self) -> None:
        found = self._known_revision()
        if found != _head():
            raise SchemaMismatch(self._mismatch(found))

    def prepare(self) -> bool:
        """Migrate the tables to this release if that is safe; return whether they were changed.

        A new SQLite file, or one at a revision before this release's, is migrated here. A PostgreSQL database is only
        checked, because other machines may use it; `turnwise db upgrade` migrates it.
        """
        found = self._known_revision()
        if found == _head():
            return False
        if self.dialect != "sqlite" or (found is None and not self._is_empty()):
            raise SchemaMismatch(self._mismatch(found))
        self.upgrade()
        return True

    def _known_revision(self) -> str | None:
        with self.read() as conn:
            if not sa.inspect(conn).has_table("alembic_version"):
                return None
            found = conn.execute(sa.text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
        if found not in (None, *_known_revisions()):
            raise SchemaMismatch(
                f"{self._name()} is at schema revision {found!r}, which this release does not know (it needs "
                f"{_head()!r}): {_MOVE.format(how='use the release that made it')}"
            )
        if found == _head():
            self._check_tables()
        return found

    def _check_tables(self) -> None:
        """Check that tables at the newest revision are those of this release: until 0.2 several commits share it."""
        with self.read() as conn:
            columns_of = sa.inspect(conn).get_multi_columns()
            found = {name: {each["name"] for each in columns} for (_, name), columns in columns_of.items()}
            differing = [
                f"{table.name}.{column}"
                for table in metadata.sorted_tables
                for column in sorted(set(table.columns.keys()) ^ found.get(table.name, set()))
            ]
            if not differing and conn.execute(_DEFAULT_POLICY).first() is None:
                differing = ["the row of the default policy"]
        if differing:
            raise SchemaMismatch(
                f"{self._name()} has the tables of another commit before release 0.2 (they differ in {differing[0]}): "
                f"{_MOVE.format(how=_IMPORT)}"
            )

    def _name(self) -> str:
        return self._engine.url.set(drivername=self.dialect).render_as_string(hide_password=True)

    def _is_empty(self) -> bool:
        with self.read() as conn:
            return not set(sa.inspect(conn).get_table_names()) - {"alembic_version"}

    def _mismatch(self, found: str | None) -> str:
        name = self._name()
        if found is None and not self._is_empty():
            return f"{name} has tables, but none of Turnwise's: name another database with --database"
        if found is None:
            return f"{name} has no Turnwise tables; run `turnwise db upgrade`, or name another database with --database"
        return f"{name} is at schema revision {found!r}, this release needs {_head()!r}; run `turnwise db upgrade`"

    def close(self) -> None:
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._engine.dispose()

    def truncate_log(self) -> None:
        """Empty SQLite's write-ahead log, which holds earlier contents of the file, unless others are using it now."""
        if self.dialect != "sqlite":
            return
        with attributed(), contextlib.closing(self._engine.raw_connection()) as pooled:
            driver: Any = pooled.driver_connection
            with _without_waiting(driver, self._lock_timeout_seconds), contextlib.suppress(sqlite3.OperationalError):
                driver.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    @contextlib.contextmanager
    def _serialised(self) -> Iterator[None]:
        if self._write_lock is None:
            yield
            return
        if not self._write_lock.acquire(timeout=self._lock_timeout_seconds):
            raise StoreUnavailable(
                f"the database was busy with another write for {self._lock_timeout_seconds} s; try again"
            )
        try:
            yield
        finally:
            self._write_lock.release()


def alembic_config() -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(importlib.resources.files("migrations")).replace("%", "%%"))
    return config


@functools.cache
def _known_revisions() -> list[str]:
    versions = importlib.resources.files("migrations") / "versions"
    return sorted(file.name[:4] for file in versions.iterdir() if file.name[:4].isdigit())


def _head() -> str:
    return _known_revisions()[-1]


@contextlib.contextmanager
def attributed() -> Iterator[None]:
    """Translate a driver's exceptions to the store's errors; programming errors are not changed."""
    try:
        yield
    except sa.exc.TimeoutError as error:
        raise StoreUnavailable(f"no database connection became free in time: {error}; raise the pool size") from error
    except sa.exc.DBAPIError as error:
        said = f"{type(error.orig).__name__}: {error.orig}".strip()
        code = getattr(error.orig, "sqlstate", None) or getattr(error.orig, "sqlite_errorname", None) or ""
        if any(mark in said for mark in _UNKNOWN_TABLE):
            raise SchemaMismatch(f"{said}; run `turnwise db upgrade`") from error
        if isinstance(error, sa.exc.DataError) or code == _TOO_LONG:
            raise InvalidRequest(f"the database cannot hold a value: {said}") from error
        if isinstance(error, (sa.exc.IntegrityError, sa.exc.ProgrammingError)):
            raise
        if found := _LOGIN_REFUSED.search(said):
            raise StoreUnavailable(
                f"database login refused ({found[0]}); check user, password and name in the URL",
                is_permanent=True,
            ) from error
        if _REFUSED in said:
            raise StoreUnavailable(
                f"no database server answers ({said.splitlines()[0]}); start it, or check host and port in the URL"
            ) from error
        raise StoreUnavailable(
            f"the database failed ({said}); check that it runs, has space and is not locked",
            is_permanent=code.startswith(_PERMANENT),
        ) from error


def attempt(
    conn: sa.Connection, change: Callable[Concatenate[sa.Connection, P], T], *arguments: P.args, **options: P.kwargs
) -> T | TurnwiseError:
    """Make a change within a transaction; return its result, or the error that refuses it after it was undone.

    Where SQLite has undone the whole transaction, as on a full disk, its first error is raised, and not that of the
    savepoint, which is gone.

    Raises:
        StoreUnavailable: nothing more can be done in the transaction.
    """
    try:
        with conn.begin_nested():
            return change(conn, *arguments, **options)
    except StoreUnavailable:
        raise
    except TurnwiseError as refusal:
        return refusal
    except sa.exc.OperationalError as error:
        first = None if error.orig is None else error.orig.__context__
        if isinstance(first, sa.exc.DBAPIError):
            raise first from None
        raise


def _parsed(url: str) -> sa.URL:
    try:
        parsed = sa.make_url(url)
    except sa.exc.ArgumentError as error:
        raise SettingsError(f"{url!r} is not a database URL; write sqlite:///FILE or postgresql://…") from error
    match parsed.get_backend_name():
        case "postgresql" | "postgres":
            return parsed.set(drivername="postgresql+psycopg")
        case "sqlite" if parsed.database and parsed.database != ":memory:":
            return parsed.set(drivername="sqlite+pysqlite")
        case "sqlite":
            raise SettingsError(f"{url!r} is an in-memory database, which processes cannot share; write sqlite:///FILE")
    raise SettingsError(f"database {parsed.get_backend_name()!r} is not supported; use sqlite or postgresql")


def _sqlite_engine(url: sa.URL, pool_size: int, lock_timeout_seconds: float) -> sa.Engine:
    engine = sa.create_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=lock_timeout_seconds,
        # Autocommit in the driver: only the code below begins transactions.
        connect_args={"timeout": lock_timeout_seconds, "isolation_level": None, "check_same_thread": False},
    )

    @sa.event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, args: Any, options: Any) -> sqlite3.Connection:
        if url.database and not url.database.startswith((":", "file:")):
            with contextlib.suppress(OSError):  # SQLite says what is wrong with it; its log gets the file's permissions
                create_private(Path(url.database))
        try:
            connection: sqlite3.Connection = sqlite3.connect(*args, **options)
            # SQLite does not wait while another process turns on the log of the same new file.
            _once_free(lambda: connection.execute("PRAGMA journal_mode=WAL"), lock_timeout_seconds)
        except sqlite3.OperationalError as error:
            if error.sqlite_errorname.startswith(_NO_FILE):
                error.args = (f"{error}: {url.database!r}, which this process must read and write, with its directory",)
            raise
        # With `secure_delete` the file holds nothing of what was deleted.
        for pragma in ("synchronous=FULL", "foreign_keys=ON", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}")
        return connection

    @sa.event.listens_for(engine, "begin")
    def _begin(conn: sa.Connection) -> None:
        if conn.get_execution_options().get("writes"):
            with _without_waiting(conn.connection.driver_connection, lock_timeout_seconds):
                _once_free(lambda: execute(conn, "BEGIN IMMEDIATE"), lock_timeout_seconds)
        else:
            execute(conn, "BEGIN")

    return engine


@contextlib.contextmanager
def _without_waiting(connection: Any, lock_timeout_seconds: float) -> Iterator[None]:
    connection.execute("PRAGMA busy_timeout=0")
    try:
        yield
    finally:
        connection.execute(f"PRAGMA busy_timeout={int(lock_timeout_seconds * 1000)}")


def _once_free(change: Callable[[], object], seconds: float) -> None:
    """Make a change to an SQLite file, again while other processes have locked it, for this long."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            change()
        except (sqlite3.OperationalError, sa.exc.OperationalError) as error:
            failure: Any = getattr(error, "orig", error)
            if not failure.sqlite_errorname.startswith("SQLITE_BUSY") or time.monotonic() > deadline:
                raise
            time.sleep(LOCK_SECONDS)
        else:
            return


def _postgresql_engine(url: sa.URL, pool_size: int, lock_timeout_seconds: float) -> sa.Engine:
    lock_timeout_ms = int(lock_timeout_seconds * 1000)
    answer_ms = int(ANSWER_SECONDS * 1000)
    engine = sa.create_engine(
        url,
        pool_size=pool_size,
        max_overflow=0,
        pool_timeout=lock_timeout_seconds,
        isolation_level="READ COMMITTED",
        # After a restart of the server, pooled connections are dead; a probe per transaction replaces them.
        pool_pre_ping=True,
        connect_args={
            "connect_timeout": max(2, int(lock_timeout_seconds)),
            "options": f"-c lock_timeout={lock_timeout_ms} -c statement_timeout={answer_ms} -c synchronous_commit=on",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "tcp_user_timeout": answer_ms,
        },
    )

    @sa.event.listens_for(engine, "do_connect")
    def _connect(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:

        connection = DeadlineConnection.connect(*args, **options)
        # The server's own limit is shorter: if the server works, its error leaves the connection usable.
        connection.answer_seconds = ANSWER_SECONDS + GRACE_SECONDS
        own = connection.execute("SELECT pg_backend_pid()").fetchone()
        if own != (connection.info.backend_pid,):
            connection.prepare_threshold = None  # a pooler's: the next transaction may be at another server process
        connection.rollback()
        return connection

    return engine


def clock(conn: sa.Connection, now: datetime.datetime | None = None) -> int:
    """Return the database's time in microseconds (leases must not depend on a client's clock), or `now` if given."""
    if now is not None:
        return to_micros(now)
    if conn.dialect.name == "postgresql":
        sql = "SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint)"
    else:
        # julianday counts days from noon, 4714 BC; 1970 begins at day 2440587.5.
        sql = "SELECT CAST(round((julianday('now') - 2440587.5) * 86400000) AS INTEGER) * 1000"
    return int(conn.exec_driver_sql(sql).scalar_one())


class IdleClock:
    """What a clock read some time ago: neither its correction nor the machine's sleep is time without activity.

    It knows the corrections since this process started.
    """

    def __init__(self, longest: datetime.timedelta) -> None:
        self._longest = longest
        self._corrections: collections.deque[tuple[float, datetime.datetime]] = collections.deque()
        """When the clock was corrected, in monotonic seconds, and what it would have read at 0 of them since then; the
        first entry is in force at the begin of the longest time."""

    def earliest(self, now: datetime.datetime, ago: datetime.timedelta) -> datetime.datetime:
        """Return the earliest that the clock, which reads `now`, can have read so long ago."""
        elapsed = monotonic()  # a name of its own: tests set this clock alone
        start = now - datetime.timedelta(seconds=elapsed)
        known = self._corrections
        if not known or abs(start - known[-1][1]) > MIN_CORRECTION:
            known.append((elapsed, start))
        while len(known) > 1 and known[1][0] <= elapsed - self._longest.total_seconds():
            known.popleft()
        return min(start for _, start in known) + datetime.timedelta(seconds=elapsed) - ago
