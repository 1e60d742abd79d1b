"""Measure queries on a store with many turns: `python bench/large_store.py [--turns 10000 100000 1000000] [--url URL]`.

Fills a store with that many turns in sessions of 33 turns, of 20 tenants, in groups of eight. One tenant is small: it
has the same 24 sessions in a store of any size. Most groups are trained, some are dropped, and some were given up by
their agents and are still open. Rows are packed as the proxy's writing process packs them.

Printed for each size: the time of the queries behind the routes, the dashboard and the trainer's polling, and a count
that does not depend on the machine: the instructions of SQLite's virtual machine, or the blocks of tables and indexes
that PostgreSQL reads. Exits with status 1 if the count of any query of the small tenant, or of the trainer's polling,
grows with the data of others.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psycopg
import sqlalchemy as sa

from turnwise.features import pace, retention, stalled
from turnwise.features.page import overview, search
from turnwise.features.page.search import Contents
from turnwise.store import claims, conversations, experiences, groups, rows, schema
from turnwise.store.database import Database
from turnwise.store.rows import to_micros
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import end_rewarded_sessions, expire_idle_sessions, list_sessions
from turnwise.store.statements import insert_rows
from turnwise.store.turns import read_turns
from turnwise.types import GroupStatus, Outcome, Reward, Session, SessionStatus, Turn, utc_now

TURNS_PER_SESSION = 33
GROUP_SIZE = 8
NUM_TENANTS = 20
SMALL, LARGE = "tenant-0", "tenant-1"
SMALL_SESSIONS = 3 * GROUP_SIZE
GIVEN_UP_EVERY, DROPPED_EVERY = 4, 7
"""Of the groups of large tenants, one in so many."""
BATCH_GROUPS = 16
REPEATS = 5
FIRST_PK = 1
"""The session whose turns the database copies to all others, because Python takes 50 µs to send a turn."""
MOST_GROWTH = {"sqlite": 1.25, "postgresql": 4.0}
"""Of the count of instructions or blocks, from the smallest store to the largest, which has ten times the rows or more:
indexes become deeper, and PostgreSQL chooses other plans."""
MOST_MORE = 8
"""And so many more: a query reads few blocks, and a deeper index adds one to each of its searches."""
START = utc_now() - datetime.timedelta(days=30)
HOUR = datetime.timedelta(hours=1)
SESSIONS_AT_AN_INSTANT = 500
"""Sessions with the same last activity."""
SHARED_EVERY = 4
"""Of the sessions, in one of so many another policy samples a turn too."""
Query = Callable[[sa.Connection], Any]


class Page(NamedTuple):
    """A query, and whether the rows that it reads are independent of the size of the store."""

    query: Query
    is_bounded: bool = True


def small_group(number: int) -> str:
    """Return the id of a group of the small tenant."""
    return f"{SMALL}-{number}"


PAGES = {
    "the counts of a small tenant (/v1/counts)": Page(lambda c: overview.count_rows(c, SMALL)),
    "the counts of a large tenant": Page(lambda c: overview.count_rows(c, LARGE), is_bounded=False),
    "a page of sessions of a small tenant": Page(lambda c: list_sessions(c, SessionFilter(tenant=SMALL))),
    "a page of sessions of a large tenant": Page(lambda c: list_sessions(c, SessionFilter(tenant=LARGE), limit=20)),
    "open sessions of a small tenant": Page(
        lambda c: list_sessions(c, SessionFilter(tenant=SMALL, status=SessionStatus.OPEN))
    ),
    "a group": Page(lambda c: list_sessions(c, SessionFilter(tenant=SMALL, group_id=small_group(0)))),
    "a search of a small tenant": Page(
        lambda c: search.search_sessions(c, SessionFilter(tenant=SMALL), Contents(outcome=Outcome.ERROR))
    ),
    "the changes of a small tenant": Page(lambda c: overview.read_state(c, SMALL)),
    "a session's turns": Page(lambda c: read_turns(c, SMALL, f"{small_group(1)}-0")),
    "a conversation that a proxy does not hold": Page(
        lambda c: conversations.unknown_turns(c, SMALL, f"{small_group(1)}-0", first=0, known=())
    ),
    "its newest turn, from another proxy": Page(
        lambda c: conversations.unknown_turns(c, SMALL, f"{small_group(1)}-0", first=TURNS_PER_SESSION - 1, known=())
    ),
    "the experiences of a session": Page(
        lambda c: list(experiences.experiences(c, SessionFilter(tenant=SMALL, session_id=f"{small_group(1)}-0")))
    ),
    "the experiences of a group": Page(
        lambda c: list(experiences.experiences(c, SessionFilter(tenant=SMALL, group_id=small_group(1))))
    ),
    "claimable groups": Page(claims.num_claimable),
    "idle sessions to expire": Page(lambda c: expire_idle_sessions(c, START - HOUR)),
    "idle sessions with a reward to end": Page(lambda c: end_rewarded_sessions(c, START - HOUR)),
    "open sessions with a reward": Page(groups.num_open_with_reward),
    "stalled groups to train": Page(lambda c: stalled.stalled(utc_now() - HOUR).is_due(c)),
    "the oldest version in flight": Page(lambda c: pace.oldest_version_in_flight(c, utc_now() - HOUR)),
    "the next sessions to delete": Page(lambda c: retention.prune(c, START + HOUR)),
    "no more sessions to delete": Page(lambda c: retention.prune(c, START - HOUR)),
    "unfinished groups for /metrics (at most 10,000)": Page(groups.unfinished_groups, is_bounded=False),
}


def turn_templates() -> list[dict[str, Any]]:
    """Return the rows of the turns of the first session: ten tokens in, five out. All others are copies of them."""
    return [
        rows.turn_row(
            Turn(
                turn_id=f"first-{seq}",
                session_id="",
                chain_id="first-0",
                seq=seq,
                step=seq,
                model="bench",
                messages=[{"role": "user", "content": f"Question {seq}."}],
                response={"role": "assistant", "content": f"Answer {seq}."},
                prompt_delta=np.arange(10, dtype=np.int32),
                prompt_length=15 * seq + 10,
                token_ids=np.arange(5, dtype=np.int32),
                logprobs=np.full(5, -0.5, np.float32),
                finish_reason="stop",
                history_digest=seq.to_bytes(8, "big"),
                created_at=START,
            ),
            FIRST_PK,
        )
        for seq in range(TURNS_PER_SESSION)
    ]


class Group(NamedTuple):
    """A group to store."""

    tenant: str
    number: int
    """Among the groups of its tenant."""
    status: GroupStatus


def all_groups(num_turns: int) -> Iterator[Group]:
    """Yield the groups of a store of that many turns; those of the small tenant lie between those of the others."""
    num_groups = max(SMALL_SESSIONS // GROUP_SIZE + NUM_TENANTS, num_turns // TURNS_PER_SESSION // GROUP_SIZE)
    num_small = SMALL_SESSIONS // GROUP_SIZE
    places = {num_groups * number // num_small: number for number in range(num_small)}
    counts = dict.fromkeys(range(1, NUM_TENANTS), 0)
    for place, tenant in zip(range(num_groups), itertools.cycle(counts), strict=False):
        if place in places:
            yield Group(SMALL, places[place], GroupStatus.TRAINED)
            continue
        number = counts[tenant]
        counts[tenant] += 1
        status = GroupStatus.DROPPED if number % DROPPED_EVERY == 1 else GroupStatus.TRAINED
        yield Group(f"tenant-{tenant}", number, GroupStatus.OPEN if number % GIVEN_UP_EVERY == 1 else status)


def fill(database: Database, num_turns: int) -> int:
    """Fill an empty store; return its number of turns."""
    group_pk = 0
    pending = all_groups(num_turns)
    while batch := list(itertools.islice(pending, BATCH_GROUPS)):
        with database.write() as connection:
            first_pk = group_pk * GROUP_SIZE + 1
            for group in batch:
                group_pk += 1
                store_group(connection, group, group_pk)
            if first_pk == FIRST_PK:
                insert_rows(connection, schema.turns, turn_templates())
            copy_turns(connection, max(first_pk, FIRST_PK + 1), group_pk * GROUP_SIZE)
    return group_pk * GROUP_SIZE * TURNS_PER_SESSION


def copy_turns(connection: sa.Connection, first_pk: int, last_pk: int) -> None:
    """Copy the turns of the first session to others, as chains with their own ids."""
    turns, sessions = schema.turns.c, schema.sessions.c

    def turn_id(seq: sa.ColumnElement[Any]) -> sa.ColumnElement[Any]:
        return sa.literal("chatcmpl-") + sessions.session_id + "-" + sa.cast(seq, sa.Text)

    own = {
        "session_pk": sessions.session_pk,
        "turn_id": turn_id(turns.seq),
        "parent_turn_id": sa.case((turns.seq > 0, turn_id(turns.seq - 1))),
        "chain_id": turn_id(sa.literal(0)),
        "policy_id": sa.case((sa.and_(sessions.session_pk % SHARED_EVERY == 0, turns.seq == 1), 1), else_=0),
    }
    found = (
        sa.select(*(own.get(column.name, column).label(column.name) for column in turns))
        .select_from(schema.sessions.join(schema.turns, turns.session_pk == FIRST_PK))
        .where(sessions.session_pk.between(first_pk, last_pk))
    )
    connection.execute(sa.insert(schema.turns).from_select([column.name for column in turns], found))


def store_group(connection: sa.Connection, group: Group, group_pk: int) -> None:
    """Store a group with its sessions, rewards and training."""
    is_over = group.status is not GroupStatus.OPEN
    group_id = f"{group.tenant}-{group.number}"
    first_pk = (group_pk - 1) * GROUP_SIZE + 1
    members = [
        Session(session_id=f"{group_id}-{run}", tenant=group.tenant, run=run, group_id=group_id, created_at=START)
        for run in range(GROUP_SIZE)
    ]
    store = {
        "group_pk": group_pk,
        "tenant": group.tenant,
        "group_id": group_id,
        "group_size": GROUP_SIZE,
        "status": group.status.value,
        "num_sessions": GROUP_SIZE,
        "num_finished": GROUP_SIZE if is_over else 0,
        "policy_id": 0,
        "last_active_at": to_micros(START),
        "fencing_token": 0,
    }
    insert_rows(connection, schema.groups, [store])
    stored = {
        "num_turns": TURNS_PER_SESSION,
        "num_chains": 1,
        "num_rewards": int(is_over),
        # Agents that were given up leave sessions that have expired without a reward.
        "status": (SessionStatus.ENDED if is_over else SessionStatus.EXPIRED).value,
        "ended_at": to_micros(START),
    }
    pks = range(first_pk, first_pk + GROUP_SIZE)
    new = [
        {
            **rows.session_row(member, group_pk),
            **stored,
            "session_pk": pk,
            "last_active_at": to_micros(START) + pk // SESSIONS_AT_AN_INSTANT,
        }
        for pk, member in zip(pks, members, strict=True)
    ]
    insert_rows(connection, schema.sessions, new)
    if is_over:
        lines = [Reward(session_id="", value=float(run % 2), created_at=START) for run in range(GROUP_SIZE)]
        insert_rows(
            connection, schema.rewards, [rows.reward_row(line, pk) for pk, line in zip(pks, lines, strict=True)]
        )
    if group.status is GroupStatus.TRAINED:
        trained = {"update_id": group_pk, "policy_version": 1, "advantages": "{}"}
        insert_rows(connection, schema.trained_sessions, [{"session_pk": pk, **trained} for pk in pks])


def num_instructions(connection: sa.Connection, query: Query) -> int:
    """Return the instructions of SQLite's virtual machine that a query takes."""
    count = itertools.count()
    driver: Any = connection.connection.driver_connection
    driver.set_progress_handler(lambda: next(count) and 0, 1)
    query(connection)
    driver.set_progress_handler(None, 0)
    return next(count)


def num_blocks(database: Database) -> int:
    """Return the blocks of tables and indexes that PostgreSQL has read for this connection's queries and all others."""
    with database.write() as connection:
        connection.execute(sa.select(sa.func.pg_stat_force_next_flush()))
    kinds = ("heap", "idx", "toast", "tidx")
    total = " + ".join(f"coalesce({kind}_blks_{how}, 0)" for kind in kinds for how in ("read", "hit"))
    with database.write() as connection:
        return int(connection.exec_driver_sql(f"SELECT sum({total}) FROM pg_statio_user_tables").scalar_one())


def measured(database: Database, query: Query) -> tuple[float, int]:
    """Return a query's milliseconds, the least of some runs, and its instructions or blocks; undo what it changes.

    On SQLite it is the CPU time, because the query runs in this process.
    """
    is_sqlite = database.dialect == "sqlite"
    clock = time.thread_time if is_sqlite else time.perf_counter
    spent, counted = [], []
    for _ in range(REPEATS):
        before = 0 if is_sqlite else num_blocks(database)
        with contextlib.suppress(UndoneError), database.write() as connection:
            started = clock()
            query(connection)
            spent.append(clock() - started)
            raise UndoneError
        if not is_sqlite:
            counted.append(num_blocks(database) - before)
    if is_sqlite:
        with contextlib.suppress(UndoneError), database.write() as connection:
            counted.append(num_instructions(connection, query))
            raise UndoneError
    return min(spent) * 1e3, min(counted)


class UndoneError(Exception):
    """Ends a transaction without a commit."""


@contextlib.contextmanager
def filled_store(url: str | None, num_turns: int) -> Iterator[Database]:
    """Open a store of that many turns: a new SQLite file, or the empty database of the URL, which is emptied after."""
    with tempfile.TemporaryDirectory() as directory:
        path = f"{directory}/large.db"
        database = Database(url or f"sqlite:///{path}")
        database.upgrade()
        started, started_cpu = time.perf_counter(), time.process_time()
        num_stored = fill(database, num_turns)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - started_cpu
        size = Path(path).stat().st_size if url is None else prepared_size(url)
        print(
            f"\n{num_stored:,} turns in {num_stored // TURNS_PER_SESSION:,} sessions, {size / 1e9:.2f} GB, filled in "
            f"{seconds:.0f} s ({cpu_seconds:.0f} s of CPU in this process)",
            flush=True,
        )
        try:
            yield database
        finally:
            if url is not None:
                with database.write() as connection:
                    names = ", ".join(f'"{table.name}"' for table in schema.metadata.sorted_tables)
                    connection.exec_driver_sql(f"TRUNCATE {names}")
            database.close()


def prepared_size(url: str) -> int:
    """Do what PostgreSQL's autovacuum does some time after many rows are added; return the size of the database."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("VACUUM ANALYZE")
        (size,) = connection.execute("SELECT pg_database_size(current_database())").fetchone() or (0,)
    return int(size)


def main() -> int:
    """Print the figures of each size; return 1 if a query that must not grow does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--url", help="an empty PostgreSQL database; by default new SQLite files")
    given = parser.parse_args()
    counts: dict[str, list[int]] = {name: [] for name in PAGES}
    for num_turns in sorted(given.turns):
        with filled_store(given.url, num_turns) as database:
            unit = "instructions" if database.dialect == "sqlite" else "blocks"
            for name, page in PAGES.items():
                milliseconds, counted = measured(database, page.query)
                print(f"  {name:45}{milliseconds:9.2f} ms{counted:12,} {unit}", flush=True)
                counts[name].append(counted)
    grown = [
        name
        for name, page in PAGES.items()
        if page.is_bounded and counts[name][-1] > MOST_GROWTH[database.dialect] * counts[name][0] + MOST_MORE
    ]
    for name in grown:
        print(f"GROWS with the data of others: {name}: {counts[name]} {unit}", flush=True)
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
