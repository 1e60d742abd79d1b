"""Real proxies for tests: each in its own process, over the test's database.

They are forks of a process that has imported the proxy. The fixtures cover the common case; `running_proxy` is for
modules that share a proxy or kill it.
"""

import contextlib
import dataclasses
import os
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx2
import pytest
import sqlalchemy as sa
from support.commands import warm_commands
from support.control_plane import wait_for_status
from support.engines import RunningEngine, load_own_weights
from support.migrated import migrated
from support.ports import free_port
from support.servers import end_group, wait_ready
from support.waiting import WAIT_SECONDS, wait_until
from support.warm_commands import WarmProcess
from support.warm_start import WORKER_NAME, WRITER_NAME
from turnwise_fake_engine import RunningFakeEngine, running_fake_engine

from turnwise.store import selection
from turnwise.store.database import Database
from turnwise.store.rewards import rewards_of
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import list_sessions
from turnwise.store.turns import TurnView, read_turns
from turnwise.types import Reward, Session

WRITER = b"proxy.writer.process"
WORKER = b"proxy.main"
"""Part of the command line that identifies the writing process."""
ALL_ROWS = 1_000_000
BROKEN = frozenset({"faulted", "aborted"})
"""Outcomes of calls with an incomplete reply."""


@dataclasses.dataclass(slots=True)
class RunningProxy:
    url: str
    """Its base URL, without `/v1`."""
    database_url: str
    log: Path
    process: WarmProcess

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"

    def session_v1(self, session_id: str) -> str:
        return f"{self.url}/sessions/{session_id}/v1"

    def turns(self, session_id: str | None = None) -> list[TurnView]:
        with self._reading() as connection:
            listed, _ = list_sessions(connection, SessionFilter(session_id=session_id), limit=ALL_ROWS)
            return [
                view
                for each in listed
                for view in read_turns(connection, each.tenant, each.session_id, limit=ALL_ROWS)[0]
            ]

    def sessions(self) -> list[Session]:
        with self._reading() as connection:
            return list_sessions(connection, SessionFilter(), limit=ALL_ROWS)[0][::-1]

    def rewards(self) -> list[Reward]:
        with self._reading() as connection:
            found, _ = selection.session_rows(connection, SessionFilter(), limit=ALL_ROWS, after=None)
            by_session = rewards_of(connection, [row.session_pk for row in found])
            return sorted((line for lines in by_session.values() for line in lines), key=lambda line: line.reward_id)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sa.Connection]:
        database = Database(self.database_url)
        try:
            with database.read() as connection:
                yield connection
        finally:
            database.close()

    def writing_process(self) -> int:
        found = wait_until(
            lambda: [pid for pid in children(self.process.pid) if is_writing_process(pid)],
            "the proxy has a writing process",
            WAIT_SECONDS,
        )
        return found[0]

    def workers(self) -> list[int]:
        return [pid for pid in children(self.process.pid) if is_process(pid, WORKER_NAME, WORKER)]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_SECONDS)


def children(pid: int) -> list[int]:
    """Return the process ids of a process's children; without those of threads that end meanwhile."""
    found: list[int] = []
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            found += map(int, (thread / "children").read_text().split())
    return found


def command_line(pid: int) -> bytes:
    """Return the command line of a process; empty once it has ended, also when it is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def is_writing_process(pid: int) -> bool:
    """Return whether a process is a proxy's writing process: one that the proxy started, or one forked for it."""
    return is_process(pid, WRITER_NAME, WRITER)


def is_process(pid: int, forked_name: str, part_of_command: bytes) -> bool:
    """Return whether a process was forked with a name, or started by a command that has this part."""
    try:
        name = Path(f"/proc/{pid}/comm").read_text().rstrip()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return name == forked_name or part_of_command in command_line(pid)


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: not command_line(pid), f"process {pid} has ended")


StartProxy = Callable[..., RunningProxy]


@contextlib.contextmanager
def running_proxy(
    engine_url: str | None,
    database_url: str,
    directory: Path,
    *flags: str,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[RunningProxy]:
    """Bring the database up to date and run a proxy over it, on a free port by default, until the block ends.

    Without an engine's address its flags name engines. The directory gets its log; the flags and the environment come
    after `turnwise proxy`'s and the test's own.
    """
    environment = {**os.environ, **(environment or {})}
    migrated(database_url)
    port = port or free_port()
    url = f"http://127.0.0.1:{port}"
    log = directory / f"proxy-{port}.log"
    engine = () if engine_url is None else ("--engine", engine_url)
    arguments = ("proxy", *engine, "--database", database_url, "--port", str(port), *flags)
    process = warm_commands().start(arguments, log=log, cwd=directory, environment=environment)
    try:
        wait_ready(f"{url}/readyz", process, log, WAIT_SECONDS)
        yield RunningProxy(url, database_url, log, process)
    finally:
        end_group(process)


@pytest.fixture
def start_proxy(tmp_path: Path) -> Iterator[StartProxy]:
    """Start proxies: `start_proxy(engine_url, *flags, database_url=…)`; else over the test's own SQLite."""
    with contextlib.ExitStack() as running:

        def start(engine_url: str, *flags: str, database_url: str | None = None, **others: object) -> RunningProxy:
            url = database_url or f"sqlite:///{tmp_path}/turnwise.db"
            return running.enter_context(running_proxy(engine_url, url, tmp_path, *flags, **others))

        yield start


@pytest.fixture
def proxy(fake_engine: RunningFakeEngine, start_proxy: StartProxy) -> RunningProxy:
    """A proxy for this test in front of its own fake engine; the probe's calls are cleared."""
    started = start_proxy(fake_engine.url)
    fake_engine.calls.clear()
    return started


@pytest.fixture
def served(engine: RunningEngine, start_proxy: StartProxy) -> Iterator[RunningProxy]:
    """A proxy, which makes the engine's own model version 0; the engine's weights are restored for other tests.

    No session is held out, so that every call is served by the version that a test has published last.
    """
    proxy = start_proxy(engine.url, "--holdout-share", "0")
    wait_for_status(proxy, 0)
    try:
        yield proxy
    finally:
        if proxy.process.poll() is None:
            proxy.kill()
        load_own_weights(engine)


@dataclasses.dataclass(frozen=True)
class ProxyAndEngine:
    proxy: RunningProxy
    engine: RunningFakeEngine


@pytest.fixture(scope="module")
def shared_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyAndEngine]:
    directory = tmp_path_factory.mktemp("proxy")
    with (
        running_fake_engine() as engine,
        running_proxy(engine.url, f"sqlite:///{directory}/turnwise.db", directory) as proxy,
    ):
        engine.calls.clear()
        yield ProxyAndEngine(proxy, engine)


@pytest.fixture
def shared_engine(shared_proxy: ProxyAndEngine) -> Iterator[RunningFakeEngine]:
    """The fake engine of the module's proxy; the rules and faults of a test are removed after the test."""
    yield shared_proxy.engine
    shared_proxy.engine.state.script.rules.clear()
    shared_proxy.engine.state.script.faults.clear()


@pytest.fixture
def empty_proxy(shared_proxy: ProxyAndEngine) -> Iterator[RunningProxy]:
    yield shared_proxy.proxy
    httpx2.delete(f"{shared_proxy.proxy.url}/v1/tenant").raise_for_status()


@pytest.fixture
def session_id() -> str:
    return uuid.uuid4().hex


def assert_served_is_stored(proxy: RunningProxy, engine: RunningFakeEngine) -> None:
    """Check that the store holds exactly the engine's calls, token for token, and at least one.

    Of an interrupted reply the received part is stored.
    """
    stored = {}
    for view in proxy.turns():
        turn_id, _, index = view.turn.turn_id.partition("#")
        stored[_call_id(turn_id), int(index or 0)] = view
    seen = {
        (_call_id(call.reply_id), index): call for call in engine.calls for index in range(len(call.token_ids) or 1)
    }
    assert seen
    assert stored.keys() == seen.keys()
    for (call_id, index), call in seen.items():
        view, sampled = stored[call_id, index], call.token_ids[index] if call.token_ids else []
        kept = view.turn.token_ids.tolist()
        assert kept == (sampled[: len(kept)] if call.outcome in BROKEN else sampled)
        if kept:
            assert view.prompt_token_ids.tolist() == call.prompt_token_ids


def _call_id(completion_id: str) -> str:
    return re.split("[-_]", completion_id, maxsplit=1)[1]
