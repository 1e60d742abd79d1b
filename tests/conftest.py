"""Databases for every test: each test of the store runs on SQLite and on a real PostgreSQL."""

import inspect
import os
from collections.abc import Iterator
from pathlib import Path

import httpx2
import hypothesis
import pytest
from support.migrated import migrated
from support.private_postgres import PrivatePostgres, binary
from support.waiting import WAIT_SECONDS

from turnwise.store.database import Database

pytest_plugins = [
    "support.collection",
    "support.engines",
    "support.lossy_gateway",
    "support.node_projects",
    "support.proxies",
    "support.tiers",
    "support.workers",
]

# What tests start as processes finds the stand-in engine of this checkout, as the tests themselves do.
STAND_IN = str(Path(__file__).parents[1] / "extras" / "fake_engine")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), STAND_IN]))

# Two test processes and their children share the cores, and idle threads of torch occupy a core while they wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `make test` repeats the same examples in each run; `make test-all` looks for new ones, and for many more of them.
hypothesis.settings.register_profile("quick", deadline=None, max_examples=24, derandomize=True)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=192)
hypothesis.settings.load_profile("quick")

# The client's own limit of five seconds is one that a busy machine exceeds.
for _part in ("connect", "read", "write", "pool"):
    setattr(inspect.signature(httpx2.get).parameters["timeout"].default, _part, WAIT_SECONDS)

DIALECTS = ["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)]


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PrivatePostgres]:
    if binary("initdb") is None or binary("postgres") is None:
        pytest.skip("HALF OF THE STORE IS NOT TESTED: install PostgreSQL's server (initdb and postgres) to run this")
    server = PrivatePostgres()
    try:
        server.start()
        yield server
    finally:
        server.close()


@pytest.fixture(scope="session")
def postgres_template(postgres_server: PrivatePostgres) -> str:
    name = postgres_server.create_database()
    migrated(postgres_server.url(name))
    return name


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def empty_database_url(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if dialect == "sqlite":
        yield f"sqlite:///{tmp_path}/empty.db"
        return
    server: PrivatePostgres = request.getfixturevalue("postgres_server")
    name = server.create_database()
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
def database_url(dialect: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if dialect == "sqlite":
        yield migrated(f"sqlite:///{tmp_path}/turnwise.db")
        return
    template = request.getfixturevalue("postgres_template")
    server: PrivatePostgres = request.getfixturevalue("postgres_server")
    name = server.create_database(template)
    yield server.url(name)
    server.drop_database(name)


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    database = Database(database_url, lock_timeout_seconds=60)
    yield database
    database.close()
