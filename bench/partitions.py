"""Compare layouts of the turns on PostgreSQL: `python bench/partitions.py --url URL [--turns 1000000]`.

Fills an empty database as bench/large_store.py does, spreads the sessions over 360 days, and stores the turns in one
table, in partitions by their time (months or days), and in partitions by their session's number, which grows with time.

Printed for each layout: the CPU of the database's process and the time for each new turn, appended in batches of 32 as
the proxy's writing process does; the blocks and the time of queries of the proxy and the routes; and what the deletion
of the first month takes: by `retention.prune`, and with `DROP TABLE` of its partition first. All tables are
dropped at the end. CPU is printed if the server runs on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import sqlalchemy as sa
from large_store import SMALL, TURNS_PER_SESSION, Query, UndoneError, fill, measured, prepared_size, small_group

from turnwise.store import history, queries, retention, tables
from turnwise.store.database import Database, to_micros
from turnwise.store.new_turns import TurnRow, append
from turnwise.store.rows import turn_row
from turnwise.types import Turn, utc_now

MONTHS = 12
DAYS = 360
DAY = datetime.timedelta(days=1)
END = utc_now()
START = END - DAYS * DAY
BATCH = 32
NUM_BATCHES = 60
WARM_UP_BATCHES = 10
"""After this many the driver has prepared its statements."""


class Layout(NamedTuple):
    """How the turns are stored."""

    name: str
    column: str | None
    """The column that partitions them; None for one table."""
    num_partitions: int = 1


LAYOUTS = (
    Layout("one table", None),
    Layout("12 partitions by time", "created_at", MONTHS),
    Layout("360 partitions by time", "created_at", DAYS),
    Layout("12 partitions by session", "session_pk", MONTHS),
)
SESSION = f"{small_group(1)}-0"
TURN = f"chatcmpl-{SESSION}-7"
QUERIES: dict[str, Query] = {
    "a turn by its id": lambda c: queries.turn(c, SMALL, TURN, whole_prompt=False),
    "a session's turns": lambda c: queries.turns(c, SMALL, SESSION),
    "a conversation that a proxy does not hold": lambda c: history.unknown_turns(c, SMALL, SESSION, first=0, known=()),
    "its newest turn": lambda c: history.unknown_turns(c, SMALL, SESSION, first=TURNS_PER_SESSION - 1, known=()),
    "a conversation by its digests": lambda c: history.sessions_of_conversation(c, SMALL, "k", [b"digest"], limit=4),
    "a call by its request key": lambda c: queries.turn_by_request(c, SMALL, SESSION, "key"),
}


def spread_sessions(database: Database) -> int:
    """Spread the sessions over the year in the order of their numbers; return how many there are."""
    with database.write() as conn:
        conn.exec_driver_sql("SET LOCAL statement_timeout = 0")
        conn.connection.driver_connection.answer_seconds = None  # type: ignore[union-attr]
        (count,) = conn.exec_driver_sql("SELECT max(session_pk) FROM sessions").one()
        at = f"{to_micros(START)} + session_pk * {(to_micros(END) - to_micros(START)) // (count + 1)}"
        conn.exec_driver_sql(f"UPDATE sessions SET created_at = {at}, last_active_at = {at}, ended_at = {at}")
        conn.exec_driver_sql("ALTER TABLE turns RENAME TO filled_turns")
        conn.exec_driver_sql("ALTER TABLE filled_turns DROP CONSTRAINT fk_turns_session_pk_sessions")
    return int(count)


def bounds(layout: Layout, num_sessions: int) -> Iterator[tuple[int, int]]:
    """Yield the range of each partition; the last one has room for what comes."""
    ends = (to_micros(START), to_micros(END)) if layout.column == "created_at" else (0, num_sessions)
    edges = [ends[0] + (ends[1] - ends[0]) * part // layout.num_partitions for part in range(layout.num_partitions)]
    yield from zip(edges, [*edges[1:], 2**62], strict=True)


def build(database: Database, layout: Layout, num_sessions: int) -> None:
    """Store the turns in a layout, with the keys and indexes that it allows."""
    key = "" if layout.column is None else f", {layout.column}"
    of_session = key if layout.column != "session_pk" else ""
    inferred = "WHERE inferred_by IS NOT NULL"
    names = [column.name for column in tables.turns.c]
    values = ["sessions.created_at + seq" if name == "created_at" else f"filled_turns.{name}" for name in names]
    copied = "FROM filled_turns JOIN sessions USING (session_pk)"
    by_range = f"PARTITION BY RANGE ({layout.column})" if layout.column else ""
    parts = enumerate(bounds(layout, num_sessions)) if layout.column else ()
    with database.write() as conn:
        conn.exec_driver_sql("SET LOCAL statement_timeout = 0")
        conn.connection.driver_connection.answer_seconds = None  # type: ignore[union-attr]
        for statement in (
            "DROP TABLE IF EXISTS turns",
            f"CREATE TABLE turns (LIKE filled_turns INCLUDING DEFAULTS) {by_range}",
            *(
                f"CREATE TABLE turns_{part} PARTITION OF turns FOR VALUES FROM ({low}) TO ({high})"
                for part, (low, high) in parts
            ),
            f"ALTER TABLE turns ADD PRIMARY KEY (turn_id{key})",
            f"ALTER TABLE turns ADD UNIQUE (session_pk, seq{of_session})",
            "ALTER TABLE turns ADD FOREIGN KEY (session_pk) REFERENCES sessions (session_pk)",
            f"CREATE UNIQUE INDEX ON turns (session_pk, request_key{of_session}) WHERE request_key IS NOT NULL",
            f"CREATE INDEX ON turns (inferred_by, history_digest) {inferred}",
            f"CREATE INDEX ON turns (inferred_by, dialogue_digest) {inferred}",
            f"INSERT INTO turns ({', '.join(names)}) SELECT {', '.join(values)} {copied}",
        ):
            conn.exec_driver_sql(statement)


def new_turns(number: int, session_ids: list[str]) -> list[TurnRow]:
    """Return a batch: the next turn of each session."""
    batch = []
    for session_id in session_ids:
        first = f"chatcmpl-{session_id}"
        seq = TURNS_PER_SESSION + number
        turn = Turn(
            turn_id=f"{first}-{seq}",
            session_id=session_id,
            tenant="tenant-1",
            parent_turn_id=f"{first}-{seq - 1}",
            chain_id="",
            model="bench",
            messages=[{"role": "user", "content": f"Question {seq}. " * 20}],
            response={"role": "assistant", "content": f"Answer {seq}. " * 20},
            prompt_delta=np.arange(100, dtype=np.int32),
            prompt_length=15 * seq + 100,
            token_ids=np.arange(50, dtype=np.int32),
            logprobs=np.full(50, -0.5, np.float32),
            created_at=END + DAY,
        )
        batch.append(turn_row(turn, 0))
    return batch


def append_turns(database: Database) -> tuple[float, float]:
    """Append turns to the newest sessions; return microseconds of the database's CPU, and of time, for each turn."""
    with database.write() as conn:
        names = sa.select(tables.sessions.c.session_id).where(tables.sessions.c.tenant == "tenant-1")
        found = list(conn.execute(names.order_by(tables.sessions.c.session_pk.desc()).limit(BATCH)).scalars())
    cpu = spent = 0.0
    for number in range(NUM_BATCHES):
        batch = new_turns(number, found)
        before, started = server_cpu(database), time.perf_counter()
        with database.write() as conn:
            append(conn, batch)
        if number >= WARM_UP_BATCHES:
            spent += time.perf_counter() - started
            cpu += server_cpu(database) - before
    num_turns = (NUM_BATCHES - WARM_UP_BATCHES) * BATCH
    return cpu / num_turns * 1e6, spent / num_turns * 1e6


def server_cpu(database: Database) -> float:
    """Return the CPU seconds of the server's process that serves this program's only connection; 0 if it is remote."""
    with database.read() as conn:
        stat = Path(f"/proc/{conn.exec_driver_sql('SELECT pg_backend_pid()').scalar_one()}/schedstat")
    return int(stat.read_text().split()[0]) / 1e9 if stat.exists() else 0.0


def log_position(database: Database) -> int:
    """Return how many bytes the server has written to its log of changes."""
    with database.read() as conn:
        return int(conn.exec_driver_sql("SELECT pg_current_wal_lsn() - '0/0'::pg_lsn").scalar_one())


def delete_month(database: Database, layout: Layout) -> str:
    """Delete the sessions of the first month, and undo it; return what it took."""
    before, wal, started = server_cpu(database), log_position(database), time.perf_counter()
    dropped, deleted = 0.0, retention.Deleted()
    with contextlib.suppress(UndoneError), database.write() as conn:
        if layout.column is not None:
            for part in range(layout.num_partitions // MONTHS):
                conn.exec_driver_sql(f"DROP TABLE turns_{part}")
            dropped = time.perf_counter() - started
        while (some := retention.prune(conn, START + DAYS // MONTHS * DAY)).has_more:
            deleted += some
        while retention.sweep(conn):
            pass
        spent = time.perf_counter() - started
        raise UndoneError
    cpu, megabytes = server_cpu(database) - before, (log_position(database) - wal) / 1e6
    return (
        f"{len(deleted.sessions)} sessions, {deleted.num_turns} turns in {spent:.1f} s, of which DROP TABLE takes "
        f"{dropped:.2f} s; {cpu:.1f} s of CPU, {megabytes:.0f} MB of log"
    )


def main() -> int:
    """Print the figures of each layout."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=1_000_000)
    parser.add_argument("--url", required=True, help="an empty PostgreSQL database")
    parser.add_argument("--layouts", nargs="+", choices=[layout.name for layout in LAYOUTS], help="by default all")
    given = parser.parse_args()
    database = Database(given.url, pool_size=1)
    with contextlib.closing(database), emptied(database):
        database.upgrade()
        fill(database, given.turns)
        print_layouts(database, given.url, given.layouts or [layout.name for layout in LAYOUTS])
    return 0


@contextlib.contextmanager
def emptied(database: Database) -> Iterator[None]:
    """Drop all tables at the end.

    Raises:
        SystemExit: the database has tables already.
    """
    if found := table_names(database):
        raise SystemExit(f"the database has the tables {found}; name an empty one, because all tables are dropped")
    try:
        yield
    finally:
        names = ", ".join(f'"{name}"' for name in table_names(database))
        if names:
            with database.write() as conn:
                conn.exec_driver_sql(f"DROP TABLE {names} CASCADE")


def table_names(database: Database) -> list[str]:
    """Return the names of all tables, without those of partitions."""
    named = (
        "SELECT relname FROM pg_class WHERE relnamespace = current_schema()::regnamespace "
        "AND relkind IN ('r', 'p') AND NOT relispartition ORDER BY relname"
    )
    with database.read() as conn:
        return list(conn.exec_driver_sql(named).scalars())


def print_layouts(database: Database, url: str, names: list[str]) -> None:
    """Measure layouts of the turns of a filled database."""
    with database.write() as conn:
        # With many partitions PostgreSQL compiles each statement of the proxy for up to a minute.
        conn.exec_driver_sql("SET jit = off")
    num_sessions = spread_sessions(database)
    for layout in LAYOUTS:
        if layout.name not in names:
            continue
        started = time.perf_counter()
        build(database, layout, num_sessions)
        size = prepared_size(url)
        print(f"{layout.name}: {size / 1e9:.2f} GB with the copy, built in {time.perf_counter() - started:.0f} s")
        cpu, spent = append_turns(database)
        print(f"  append a turn: {cpu:.0f} µs of the database's CPU, {spent:.0f} µs in all")
        for name, query in QUERIES.items():
            milliseconds, blocks = measured(database, query)
            print(f"  {name:45}{milliseconds:9.2f} ms{blocks:8} blocks")
        print(f"  delete the first month: {delete_month(database, layout)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
