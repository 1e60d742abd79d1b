"""Plans of all statements that routes, the proxy, the trainer and the dashboard send: none scans a table that grows.

`support.store_calls` calls every function of `turnwise.store` and `turnwise.features`. A call site that sends a
statement there and sends none in these tests fails one of them, so a new statement cannot be left out.
"""

import ast
import contextlib
import importlib
import itertools
import os
import re
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
import pytest
import sqlalchemy as sa
from support.migrated import new_database
from support.private_postgres import PrivatePostgres
from support.store_calls import CALLS, GROWING_WITH_THE_TENANT, OF_TENANT, OF_THE_WHOLE_STORE, Ask
from support.store_fill import fill, fill_more

import turnwise.store
from turnwise.store.database import Database

GROWING = "sessions|turns|rewards|feedback|groups|idempotency|trained_sessions|session_labels|engine_minutes|costs"
FILLED = ("sessions", "turns", "rewards", "groups", "trained_sessions")
"""Tables that bench/large_store.py fills; PostgreSQL reads a small table as a whole, which costs least."""
A_SCAN = re.compile(rf"^SCAN ({GROWING})(_\d+)?\b")
BENCH = Path(__file__).parents[3] / "bench"
PACKAGE = Path(turnwise.store.__file__).parents[1]
IN_PACKAGE = f"{PACKAGE}{os.sep}"
NOT_RECORDED = {
    "store/statements.py": "sends what its callers ask for",
    "features/copying.py": "reads every table whole, because a person asks for it",
    "features/verify/records.py": "reads what a person asks to be verified, all of it",
    "store/database.py": "connects and migrates",
    "features/proxies.py": "sends and listens, on PostgreSQL alone",
}
LOST_RACES = {"store/sessions.py: groups.leave(conn, [pk for key, pk in group_pks.items() if key not in created])"}
"""Call sites that run only if another transaction has created the same session meanwhile."""
ONLY_ON_POSTGRESQL = {
    "features/consent.py: conn.execute(sa.text('LOCK TABLE consent_marks IN EXCLUSIVE MODE'))",
    "features/ratings/draws.py: conn.execute(sa.text('LOCK TABLE rating_draws IN EXCLUSIVE MODE'))",
    "features/limits.py: conn.exec_driver_sql('SET LOCAL synchronous_commit = off')",
}
"""Call sites that send nothing on SQLite."""
OF_A_QUARTER = "stalled groups to drop: "
"""In the store of a million turns, whose agents gave up one group of four, this call closes all of them at once."""
OTHER_GROUPS = 60
MOST_GROWTH = 1.05
MOST_MORE = 20
"""Instructions that a query may take more in a store with ten times the data of other tenants."""
Place = tuple[str, int]
"""A file of the store and a line."""


class Sent(NamedTuple):
    text: str
    params: Any = None

    @property
    def is_planned(self) -> bool:
        return re.match(r"(?i)\s*(select|with|insert|update|delete)\b", self.text) is not None


class Recording:
    """Records the statements of a connection, and the lines of the store that send them."""

    def __init__(self) -> None:
        self.sent: list[Sent] = []
        self.places: set[Place] = set()

    def add(self, sent: Sent) -> None:
        self.sent.append(sent)
        frame: types.FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_filename.startswith(IN_PACKAGE):
                self.places.add((frame.f_code.co_filename.removeprefix(IN_PACKAGE), frame.f_lineno))
            frame = frame.f_back

    @contextlib.contextmanager
    def on(self, conn: sa.Connection) -> Iterator[None]:
        record = self._sqlite if conn.dialect.name == "sqlite" else self._postgresql
        with record(conn.connection.driver_connection):
            yield

    @contextlib.contextmanager
    def _sqlite(self, driver: Any) -> Iterator[None]:
        driver.set_trace_callback(lambda text: self.add(Sent(text)))
        try:
            yield
        finally:
            driver.set_trace_callback(None)

    @contextlib.contextmanager
    def _postgresql(self, driver: Any) -> Iterator[None]:
        before = driver.cursor_factory, driver.server_cursor_factory
        driver.cursor_factory, driver.server_cursor_factory = self._cursor(before[0]), self._cursor(before[1])
        try:
            yield
        finally:
            driver.cursor_factory, driver.server_cursor_factory = before

    def _cursor(self, kind: type[Any]) -> type[Any]:
        add = self.add

        class RecordingCursor(kind):
            def execute(self, query: Any, params: Any = None, **options: Any) -> Any:
                add(Sent(query if isinstance(query, str) else query.decode(), params))
                return super().execute(query, params, **options)

            def executemany(self, query: Any, params_seq: Any, **options: Any) -> Any:
                add(Sent(query if isinstance(query, str) else query.decode(), params_seq[0]))
                return super().executemany(query, params_seq, **options)

        return RecordingCursor


class Node(NamedTuple):
    text: str
    statement: str
    scanned: str | None
    """The table that it reads as a whole, or by an index in which it looks for nothing."""


def sqlite_nodes(conn: sa.Connection, sent: Sent) -> Iterator[Node]:
    for *_, text in conn.exec_driver_sql(f"EXPLAIN QUERY PLAN {sent.text}"):
        found = A_SCAN.match(text)
        yield Node(text, sent.text, found and found[1])


def postgresql_nodes(conn: sa.Connection, sent: Sent) -> Iterator[Node]:
    driver: Any = conn.connection.driver_connection
    with psycopg.Cursor(driver) as cursor:
        (found,) = cursor.execute(f"EXPLAIN (FORMAT JSON) {sent.text}", sent.params).fetchone() or ()
    pending = [(found[0]["Plan"], False)]
    while pending:
        step, is_limited = pending.pop()
        is_limited |= step["Node Type"] == "Limit"
        pending += [(below, is_limited) for below in step.get("Plans", ())]
        table = step.get("Relation Name", "")
        by_index = step["Node Type"] in ("Index Scan", "Index Only Scan")
        is_whole = step["Node Type"] == "Seq Scan" or (by_index and "Index Cond" not in step and not is_limited)
        is_scan = is_whole and re.fullmatch(GROWING, table)
        yield Node(f"{step['Node Type']} {table}", sent.text, table if is_scan else None)


def recorded(
    database: Database, ask: Ask, recording: Recording, *, before: Callable[[sa.Connection], Any] = lambda _: None
) -> list[Node]:
    """Make a call and undo it; return the plans of its statements, which are recorded."""
    nodes_of = sqlite_nodes if database.dialect == "sqlite" else postgresql_nodes
    with undone(database) as conn:
        before(conn)
        with recording.on(conn):
            ask(conn)
        return [node for sent in recording.sent if sent.is_planned for node in nodes_of(conn, sent)]


@contextlib.contextmanager
def undone(database: Database) -> Iterator[sa.Connection]:
    class UndoneError(Exception):
        """Ends the transaction."""

    with contextlib.suppress(UndoneError), database.write() as conn:
        yield conn
        raise UndoneError


@pytest.fixture(scope="module")
def sqlite_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    database = new_database(tmp_path_factory.mktemp("plans") / "store.db")
    fill(database)
    fill_more(database, OTHER_GROUPS)
    yield database
    database.close()


@pytest.fixture(scope="module")
def postgres_store(postgres_server: PrivatePostgres, postgres_template: str) -> Iterator[Database]:
    name = postgres_server.create_database(postgres_template)
    database = Database(postgres_server.url(name))
    fill(database)
    fill_more(database, OTHER_GROUPS)
    yield database
    database.close()
    postgres_server.drop_database(name)


@pytest.fixture(scope="module")
def sqlite_calls(sqlite_store: Database) -> dict[str, tuple[list[Node], Recording]]:
    """The plans of every call, and what it sent."""
    return {name: (recorded(sqlite_store, ask, made := Recording()), made) for name, ask in CALLS.items()}


def scans(plans: Iterable[tuple[str, list[Node]]], tables: Collection[str] = GROWING.split("|")) -> list[str]:
    """Return the scans of these tables, of all calls but those that read everything by their purpose."""
    return [
        f"{name}: {node.text}\n    in {node.statement}"
        for name, nodes in plans
        if name not in OF_THE_WHOLE_STORE
        for node in nodes
        if node.scanned in tables
    ]


def plans(database: Database, **options: Any) -> Iterator[tuple[str, list[Node]]]:
    return ((name, recorded(database, ask, Recording(), **options)) for name, ask in CALLS.items())


def test_no_statement_scans_a_table_that_grows(sqlite_calls):
    assert scans((name, nodes) for name, (nodes, _) in sqlite_calls.items()) == []


def without_scans(conn: sa.Connection) -> None:
    """Let PostgreSQL look up rows by indexes wherever it can: in small tables it prefers to read all of them."""
    for method in ("seqscan", "hashjoin", "mergejoin"):
        conn.exec_driver_sql(f"SET LOCAL enable_{method} = off")


@pytest.mark.postgres
def test_no_statement_scans_a_table_that_grows_on_postgresql(postgres_store):
    assert scans(plans(postgres_store, before=without_scans)) == []


@pytest.mark.slow
@pytest.mark.postgres
def test_no_statement_scans_a_table_of_a_store_of_a_million_turns_on_postgresql(
    postgres_server, postgres_template, monkeypatch
):
    """PostgreSQL chooses these plans by the statistics of the tables; SQLite's do not depend on the size."""
    monkeypatch.syspath_prepend(str(BENCH))
    large_store = importlib.import_module("large_store")
    name = postgres_server.create_database(postgres_template)
    url = postgres_server.url(name)
    with contextlib.closing(Database(url)) as database:
        large_store.fill(database, 1_000_000)
        with database.write() as conn:
            for table, key in (("groups", "group_pk"), ("sessions", "session_pk")):
                conn.exec_driver_sql(
                    f"SELECT setval(pg_get_serial_sequence('{table}', '{key}'), (SELECT max({key}) FROM {table}))"
                )
        fill(database)
        large_store.prepared_size(url)
        assert [scan for scan in scans(plans(database), FILLED) if not scan.startswith(OF_A_QUARTER)] == []
    postgres_server.drop_database(name)


class Site(NamedTuple):
    file: str
    first: int
    last: int
    text: str


def sites() -> Iterator[Site]:
    """Yield the calls in the store that send statements, or hand a connection to what does.

    Calls of generators are left out: the statements are sent later, by call sites in the generators.
    """
    files = [path for room in ("store", "features") for path in sorted((PACKAGE / room).rglob("*.py"))]
    modules = {str(path.relative_to(PACKAGE)): ast.parse(path.read_text()) for path in files}
    generators = {
        node.name
        for module in modules.values()
        for node in ast.walk(module)
        if isinstance(node, ast.FunctionDef)
        if any(isinstance(each, ast.Yield | ast.YieldFrom) for each in ast.walk(node))
    }
    for name, module in modules.items():
        if name in NOT_RECORDED:
            continue
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and (_sends(node.func) or any(map(_is_connection, node.args))):
                called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if called not in generators:
                    yield Site(name, node.lineno, node.end_lineno or node.lineno, ast.unparse(node))


def _is_connection(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "conn"


def _sends(node: ast.expr) -> bool:
    """Return whether a function is `execute` or another method of `conn`, or of what a method of it returns."""
    if not isinstance(node, ast.Attribute) or node.attr not in ("execute", "exec_driver_sql", "scalar", "scalars"):
        return False
    base = node.value
    while isinstance(base, ast.Call | ast.Attribute):
        base = base.func if isinstance(base, ast.Call) else base.value
    return _is_connection(base)


def test_every_call_site_of_the_store_sends_a_statement_in_these_tests(sqlite_calls):
    places = set().union(*(recording.places for _, recording in sqlite_calls.values()))
    missing = [
        f"{site.file}:{site.first}: {site.text}"
        for site in sites()
        if not any((site.file, line) in places for line in range(site.first, site.last + 1))
        and f"{site.file}: {site.text}" not in LOST_RACES | ONLY_ON_POSTGRESQL
    ]
    assert missing == [], "add a call to tests/support/store_calls.py for each"


def num_instructions(database: Database, ask: Ask) -> int:
    count = itertools.count()
    with undone(database) as conn:
        driver: Any = conn.connection.driver_connection
        driver.set_progress_handler(lambda: next(count) and 0, 1)
        try:
            ask(conn)
        finally:
            driver.set_progress_handler(None, 0)
    return next(count)


@contextlib.contextmanager
def filled(path: Path, num_others: int, num_own: int) -> Iterator[Database]:
    """Open a new SQLite store with so many groups of other tenants, and of the small one."""
    database = new_database(path)
    fill(database)
    fill_more(database, num_others)
    fill_more(database, num_own, ["t"])
    yield database
    database.close()


def growing(names: Collection[str], few: Database, many: Database) -> dict[str, tuple[int, int]]:
    counts = {name: tuple(num_instructions(database, CALLS[name]) for database in (few, many)) for name in names}
    return {name: pair for name, pair in counts.items() if pair[1] > MOST_GROWTH * pair[0] + MOST_MORE}


def test_the_work_of_a_tenants_call_does_not_grow_with_the_data_of_other_tenants(sqlite_store, tmp_path):
    """Nor that of a look for old sessions, which reads no young one."""
    with filled(tmp_path / "others.db", 10 * OTHER_GROUPS, 0) as larger:
        assert growing([*OF_TENANT, "no more old sessions"], sqlite_store, larger) == {}


def test_the_work_of_a_call_of_one_session_does_not_grow_with_its_tenants_data(sqlite_store, tmp_path):
    with filled(tmp_path / "own.db", OTHER_GROUPS, 10 * OTHER_GROUPS) as larger:
        assert growing(OF_TENANT.keys() - GROWING_WITH_THE_TENANT, sqlite_store, larger) == {}
