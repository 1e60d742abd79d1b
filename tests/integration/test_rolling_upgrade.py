"""Two releases on one database: the older one serves, is trained from and starts again on the newer one's tables.

The older release is the code of a commit, taken from the repository's history.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from support.dialects import QUICK_ON_SQLITE
from support.proxies import RunningProxy, running_proxy
from support.waiting import wait_until

from turnwise.fake_engine import RunningFakeEngine
from turnwise.store import queries
from turnwise.store.database import Database
from turnwise.types import Outcome

ROOT = Path(__file__).parents[2]
OLDER_COMMIT = "2a8e7aef4ac7d6e83097653d7e2926d7a111e6f5"
OLDER_REVISION = "0009"
"""The newest tables that the older release knows."""
LATER_TABLES = (
    "UPDATE alembic_version SET version_num = '9999'",
    "ALTER TABLE turns ADD COLUMN later TEXT",
    "ALTER TABLE sessions ADD COLUMN later INTEGER NOT NULL DEFAULT 7",
    "CREATE TABLE later (name TEXT NOT NULL PRIMARY KEY)",
)
"""What a later release's migrations may do."""


@pytest.fixture(scope="session")
def older_release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the older release's code."""
    archive = subprocess.run(
        ["git", "archive", OLDER_COMMIT, "proxy", "trainer", "turnwise", "migrations", "tests/support"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if archive.returncode:
        pytest.skip(
            f"TWO RELEASES ARE NOT TESTED: this checkout lacks the commit {OLDER_COMMIT[:7]}; fetch the whole history"
        )
    directory = tmp_path_factory.mktemp("older-release")
    subprocess.run(["tar", "x"], cwd=directory, input=archive.stdout, check=True)
    return directory


class Agent:
    """Plays one session, each turn through the proxy that the test names."""

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        self.messages: list[dict[str, str]] = []

    def play(self, proxy: RunningProxy) -> None:
        """Make one call, and post its reward."""
        self.messages.append({"role": "user", "content": f"turn {len(self.messages)}"})
        reply = post(proxy, f"/sessions/{self.session_id}/v1/chat/completions", {"messages": self.messages})
        self.messages.append(reply["choices"][0]["message"])
        post(proxy, "/v1/rewards", {"turn_id": reply["id"], "value": 0.5})

    def end(self, proxy: RunningProxy) -> None:
        """End the session with a reward."""
        post(proxy, f"/v1/sessions/{self.session_id}/end", {"reward": 1.0})


def post(proxy: RunningProxy, path: str, body: dict[str, Any]) -> Any:
    reply = httpx2.post(proxy.url + path, json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


def assert_one_exact_chain(proxy: RunningProxy, session_id: str, num_turns: int) -> None:
    turns = [view.turn for view in proxy.turns(session_id)]
    assert [turn.outcome for turn in turns] == [Outcome.EXACT] * num_turns
    assert len({turn.chain_id for turn in turns}) == 1


@pytest.fixture
def older_proxy(
    older_release: Path, fake_engine: RunningFakeEngine, empty_database_url: str, tmp_path: Path
) -> Iterator[RunningProxy]:
    """A proxy of the older release on its own tables."""
    database = Database(empty_database_url)
    database.upgrade(OLDER_REVISION)
    database.close()
    with running_proxy(fake_engine.url, empty_database_url, tmp_path, release=older_release) as proxy:
        yield proxy


@QUICK_ON_SQLITE
def test_an_older_release_serves_and_trains_on_the_next_releases_tables(
    older_release: Path, older_proxy: RunningProxy, fake_engine: RunningFakeEngine, tmp_path: Path
) -> None:
    """The tables are migrated under the running older proxy; then proxies of both releases share each session."""
    agent, ended = Agent("shared"), Agent("ended")
    agent.play(older_proxy)
    ended.play(older_proxy)
    database = Database(older_proxy.database_url)
    database.upgrade()
    agent.play(older_proxy)
    with running_proxy(fake_engine.url, older_proxy.database_url, tmp_path) as newer:
        for proxy in (newer, older_proxy, newer, older_proxy):
            agent.play(proxy)
            ended.play(proxy)
        agent.end(older_proxy)
        ended.end(newer)
        assert_one_exact_chain(newer, "shared", 6)
        assert_one_exact_chain(newer, "ended", 5)
        with older_trainer(older_release, older_proxy.database_url, tmp_path):
            wait_until(lambda: read_counts(database).groups == {"trained": 2}, "the older trainer trains both groups")
        updates = httpx2.get(f"{newer.url}/v1/updates").json()["data"]
        assert sum(update["num_sessions"] for update in updates) == 2
    database.close()


@QUICK_ON_SQLITE
def test_this_release_starts_and_serves_on_the_tables_of_a_later_one(
    fake_engine: RunningFakeEngine, database_url: str, tmp_path: Path
) -> None:
    database = Database(database_url)
    with database.write() as connection:
        for statement in LATER_TABLES:
            connection.exec_driver_sql(statement)
    with running_proxy(fake_engine.url, database_url, tmp_path, release=ROOT) as proxy:
        agent = Agent("s")
        agent.play(proxy)
        agent.play(proxy)
        agent.end(proxy)
        assert_one_exact_chain(proxy, "s", 2)
    assert read_counts(database).groups == {"ready": 1}
    database.close()


def read_counts(database: Database) -> queries.Counts:
    with database.read() as connection:
        return queries.counts(connection)


@contextlib.contextmanager
def older_trainer(release: Path, database_url: str, directory: Path) -> Iterator[None]:
    """Run a trainer of the older release until the block ends."""
    clock = directory / "clock"
    clock.write_text("0")
    program = release / "tests/support/claiming_trainer.py"
    argv = [sys.executable, str(program), database_url, "older", "1", "0", str(clock), str(directory / "no-hold")]
    with (directory / "trainer.log").open("wb") as log:
        process = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(release)}, stdout=log, stderr=log)
    try:
        yield
    finally:
        process.kill()
        process.wait()
