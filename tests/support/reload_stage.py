"""The reloader of a proxy process, step by step: over a real store and fake engines that record what they load."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.migrated import migrated
from support.tiny_checkpoints import FACTORS, WEIGHTS, write_adapter, write_weights
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine

from proxy.engines.engine import Engine
from proxy.engines.pool import EnginePool
from proxy.fault import FaultPoints
from proxy.features import IN_STORE, Settings, served
from proxy.metrics import Metrics
from proxy.reload.driver import Reloader
from proxy.reload.parts import ReloadParts
from proxy.reload.version_files import ReadingProcess, VersionFiles
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import EngineUnsuitable
from turnwise.features import rewinds
from turnwise.store.database import Database
from turnwise.store.versions import list_versions, publish_version
from turnwise.types import PolicyKind, PolicyVersion, Session


class Process:
    """The reloader of a proxy process, without its timer."""

    def __init__(self, stage: Stage, *, parts: ReloadParts | None = None, **settings: object) -> None:
        metrics = Metrics()
        self._publish = stage.publish
        given = Settings(engine=[engine.url for engine in stage.engines], **settings)
        self.writer = Writer(ProxySettings(database=stage.url), metrics, IN_STORE)
        self.pool = EnginePool(given.engine, metrics, stage.database, timeout_seconds=60)
        self.unsuitable: str | None = None
        self.others: list[Process] = []
        """The other workers of the same proxy, which are told what this one loads."""
        self.reading = ReadingProcess()
        self.reloader = Reloader(
            stage.database,
            self.writer,
            self.pool,
            given,
            metrics,
            check_engine=self._probe,
            faults=FaultPoints(),
            announce=self._announce,
            confirm=self._confirm,
            files=VersionFiles(self.reading),
            parts=parts or served().reload,
        )

    async def _probe(self, engine: Engine) -> None:
        if engine.url == self.unsuitable:
            raise EngineUnsuitable(f"{engine.url} gives raw logprobs")
        engine.info = await engine.ask("GET", "/server_info")

    async def _announce(self, engine: Engine) -> None:
        for other in self.others:
            other.pool.note_label(engine.url, str(engine.loaded_version))

    async def _confirm(self, seconds: float, change: str, *of: str) -> None:
        assert seconds > 0
        for other in self.others:
            await other.reloader.changes[change](*of)

    async def follow(self) -> None:
        await self.reloader._follow()

    async def serve(self, *versions: int, kind: PolicyKind = PolicyKind.FULL) -> None:
        """Publish versions, with a round after each."""
        for version in versions:
            self._publish(version, kind)
            await self.follow()

    async def version_of(self, session: Session) -> int:
        lane = await self.pool.admit(session)
        self.pool.release(lane)
        return lane.version

    async def versions_of(self, sessions: list[Session]) -> set[int]:
        return {await self.version_of(session) for session in sessions}

    async def open_sessions(self, prefix: str) -> tuple[list[Session], list[Session]]:
        """Open 16 sessions; return those that a trial or a hold-out took, and the others."""
        opened = [(await self.writer.open(Session(session_id=f"{prefix}{number}")))[0] for number in range(16)]
        return [one for one in opened if one.arm is not None], [one for one in opened if one.arm is None]

    async def look(self) -> None:
        await self.reloader._check_engines(self.pool.engines)

    @property
    def versions(self) -> list[int | None]:
        """The version that each engine serves, None where it gets no calls."""
        return [self.pool.version_on(engine) if engine.is_serving else None for engine in self.pool.engines]


@dataclasses.dataclass
class Stage:
    database: Database
    url: str
    engines: list[RunningFakeEngine]
    directory: Path

    @contextlib.asynccontextmanager
    async def process(self, *, parts: ReloadParts | None = None, **settings: object) -> AsyncIterator[Process]:
        process = Process(self, parts=parts, **settings)
        await process.writer.start()
        try:
            await process.reloader.start()
            yield process
        finally:
            await process.pool.close()
            process.reading.close()
            await process.writer.close()

    def publish(self, version: int, kind: PolicyKind = PolicyKind.FULL, *, whole: bool = True) -> str:
        write, tensors = {PolicyKind.FULL: (write_weights, WEIGHTS), PolicyKind.LORA: (write_adapter, FACTORS)}[kind]
        broken = {name: np.full_like(tensor, np.nan) for name, tensor in tensors.items()}
        place = write(self.directory / f"v{version}", tensors if whole else broken)
        with self.database.write() as connection:
            publish_version(connection, PolicyVersion(version=version, path=str(place), kind=kind))
        return str(place)

    @contextlib.contextmanager
    def rejecting_trials(self) -> Iterator[None]:
        """Let the database reject the start of any trial, though not its preparation, until the block ends."""
        with self.database.write() as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER reject_trials BEFORE UPDATE ON policy_versions "
                "WHEN NEW.status = 'canary' AND NEW.activated_at > 0 BEGIN SELECT RAISE(ABORT, 'no trial'); END"
            )
        yield
        with self.database.write() as connection:
            connection.exec_driver_sql("DROP TRIGGER reject_trials")

    def pin(self, version: int | None) -> None:
        with self.database.write() as connection:
            rewinds.pin_policy(connection, version)

    def statuses(self) -> list[str]:
        with self.database.read() as connection:
            found, _ = list_versions(connection)
        return [policy.status.value for policy in found[::-1]]

    @property
    def loads(self) -> list[list[str]]:
        return [[Path(path).name for path in engine.state.reloads] for engine in self.engines]


@contextlib.contextmanager
def running_stage(directory: Path, *scripts: Script) -> Iterator[Stage]:
    url = f"sqlite:///{directory}/turnwise.db"
    database = Database(migrated(url))
    with contextlib.ExitStack() as engines:
        running = [engines.enter_context(running_fake_engine(script)) for script in scripts]
        yield Stage(database, url, running, directory)
    database.close()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with running_stage(tmp_path, Script(lora=True), Script(lora=True)) as stage:
        yield stage
