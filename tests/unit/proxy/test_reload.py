"""What one round of the reloader does, step by step: over a real store, and fake engines that show what they loaded."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from proxy.engines.pool import LOADING, Engine, EnginePool
from proxy.metrics import Metrics
from proxy.reload.canary import Canary
from proxy.reload.reloader import LEASE, LEASE_SECONDS, Reloader
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import EngineUnsuitable, LeaseLost, StoreUnavailable
from turnwise.fake_engine import RunningFakeEngine, Script, running_fake_engine
from turnwise.processes.stack import free_port
from turnwise.store import leases, policies
from turnwise.store.database import Database
from turnwise.types import PolicyKind, PolicyStatus, PolicyVersion, Session


class Process:
    """A proxy process, as far as reloads go, without the clock that drives it."""

    def __init__(self, database: Database, url: str, engines: list[RunningFakeEngine], **settings: object) -> None:
        metrics = Metrics()
        given = ProxySettings(engine=[engine.url for engine in engines], **settings)  # type: ignore[arg-type]
        self.writer = Writer(url, metrics, timeout_seconds=5)
        self.pool = EnginePool(given.engine, metrics, timeout_seconds=5, max_concurrent_calls=10)
        self.unsuitable: str | None = None
        self.reloader = Reloader(database, self.writer, self.pool, given, metrics, learn=self._learn)

    async def _learn(self, engine: Engine) -> None:
        if engine.url == self.unsuitable:
            raise EngineUnsuitable(f"{engine.url} gives raw logprobs")

    async def follow(self) -> None:
        """Look at the store once."""
        await self.reloader._follow()

    async def look(self) -> None:
        """Look at the engines once."""
        await self.reloader._check_engines(self.pool.engines)

    @property
    def versions(self) -> list[int | None]:
        """What each engine serves, None where it gets no calls."""
        return [engine.version if engine.healthy else None for engine in self.pool.engines]


@dataclasses.dataclass
class Stage:
    """A store and two engines."""

    database: Database
    url: str
    engines: list[RunningFakeEngine]
    directory: Path

    @contextlib.asynccontextmanager
    async def process(self, **settings: object) -> AsyncIterator[Process]:
        """Start a process over them."""
        process = Process(self.database, self.url, self.engines, **settings)
        await process.writer.start()
        try:
            await process.reloader.start()
            yield process
        finally:
            process.pool.close()
            await process.writer.close()

    def publish(self, version: int, kind: PolicyKind = PolicyKind.FULL, *, whole: bool = True) -> str:
        place = self.directory / f"v{version}"
        place.mkdir()
        file = {PolicyKind.FULL: "model", PolicyKind.LORA: "adapter_model"}[kind]
        tensor = {PolicyKind.FULL: "w", PolicyKind.LORA: "layer.lora_A.weight"}[kind]
        config = {PolicyKind.FULL: "config.json", PolicyKind.LORA: "adapter_config.json"}[kind]
        save_file({tensor: np.full((1, 1), 0.0 if whole else np.nan, np.float32)}, place / f"{file}.safetensors")
        (place / config).write_text('{"peft_type": "LORA", "r": 1}' if kind is PolicyKind.LORA else "{}")
        with self.database.write() as connection:
            policies.publish_policy(connection, PolicyVersion(version=version, path=str(place), kind=kind))
        return str(place)

    def pin(self, version: int | None) -> None:
        with self.database.write() as connection:
            policies.pin_policy(connection, version)

    def statuses(self) -> list[str]:
        """Return what the store says of each version, oldest first."""
        with self.database.read() as connection:
            found, _ = policies.list_policies(connection)
        return [policy.status.value for policy in found[::-1]]

    @property
    def loads(self) -> list[list[str]]:
        """What each engine loaded, by the names of the directories."""
        return [[Path(path).name for path in engine.state.reloads] for engine in self.engines]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    url = f"sqlite:///{tmp_path}/turnwise.db"
    database = Database(url)
    database.upgrade()
    with running_fake_engine(Script(lora=True)) as first, running_fake_engine(Script(lora=True)) as second:
        yield Stage(database, url, [first, second], tmp_path)
    database.close()


async def test_the_newest_version_is_brought_to_every_engine_once(stage: Stage):
    """A round that finds nothing to do loads nothing; versions that were skipped on the way stay published."""
    async with stage.process() as process:
        await process.follow()
        assert (process.versions, stage.loads) == ([0, 0], [[], []])
        stage.publish(1)
        stage.publish(2)
        for _ in range(2):
            await process.follow()
            assert (process.versions, stage.loads) == ([2, 2], [["v2"], ["v2"]])
        assert stage.statuses() == ["published", "active"]
        stage.publish(3)
        await process.follow()
        assert stage.statuses() == ["published", "retired", "active"]


async def test_a_pin_outweighs_what_is_newer_until_it_is_let_go(stage: Stage):
    async with stage.process() as process:
        for version in (1, 2):
            stage.publish(version)
        stage.pin(1)
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, 1], ["active", "published"])
        stage.pin(None)
        await process.follow()
        assert (process.versions, stage.statuses()) == ([2, 2], ["retired", "active"])


async def test_a_version_that_cannot_be_served_fails_and_the_active_one_stays(stage: Stage):
    """No engine hears of it, and it is not tried again, pinned or not; the reason stays readable until one works."""
    async with stage.process() as process:
        stage.publish(1)
        await process.follow()
        stage.publish(2, whole=False)
        stage.pin(2)
        for _ in range(2):
            await process.follow()
            assert (process.versions, stage.statuses()) == ([1, 1], ["active", "failed"])
        assert "version 2 was not taken" in (process.reloader.last_error or "")
        assert stage.loads == [["v1"], ["v1"]]
        stage.pin(None)
        stage.publish(3)
        await process.follow()
        assert (process.versions, process.reloader.last_error) == ([3, 3], None)


async def test_while_another_process_drives_this_one_learns_from_the_labels(stage: Stage):
    """It loads nothing itself; what the engines say they hold is what its turns are stored with."""
    async with stage.process() as driver, stage.process() as follower:
        stage.publish(1)
        async with driver.reloader._driving() as is_driver:
            assert is_driver
            await follower.follow()
            assert stage.loads == [[], []]
            for engine in stage.engines:
                engine.state.weight_version = "1"
            await follower.follow()
        assert follower.versions == [1, 1]
        assert stage.loads == [[], []]


async def test_who_lost_the_lease_in_the_middle_writes_nothing(stage: Stage):
    """A process that was frozen for longer than its lease must not overrule the one that took over."""
    async with stage.process() as process:
        stage.publish(1)
        with stage.database.read() as connection:
            target = policies.get_policy(connection, 1)
        async with process.reloader._driving():
            with stage.database.write() as connection:
                token = process.reloader._token
                assert token is not None
                leases.release_lease(connection, LEASE, token)
                assert leases.acquire_lease(connection, LEASE, "another", LEASE_SECONDS) == token + 1
            with pytest.raises(LeaseLost, match="another process has taken over"):
                await process.reloader._succeed(target, 0.0)
        assert stage.statuses() == ["published"]


async def test_an_engine_that_came_back_with_other_weights_gets_no_call_before_it_is_mended(stage: Stage):
    """One that was restarted has its original weights, and no label; one whose driver died has no version's."""
    async with stage.process() as process:
        stage.publish(1)
        await process.follow()
        for label in ("default", LOADING):
            engine = stage.engines[1].state
            engine.weights_path, engine.weight_version = engine.model_path, label
            engine.running.clear()
            await process.look()
            assert process.versions == [1, 1]
            assert (Path(engine.weights_path).name, engine.weight_version) == ("v1", "1")
            assert engine.running.is_set()
        assert stage.loads == [["v1"], ["v1"] * 3]


async def test_an_engine_that_is_away_is_left_out_and_let_in_when_it_comes(stage: Stage):
    """At the start and later; the others serve meanwhile."""
    port = free_port()
    stage.engines[1] = dataclasses.replace(stage.engines[1], url=f"http://127.0.0.1:{port}")
    async with stage.process() as process:
        assert process.versions == [0, None]
        stage.publish(1)
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, None], ["active"])
        with running_fake_engine(port=port) as come:
            await process.look()
            assert process.versions == [1, 1]
            assert [Path(path).name for path in come.state.reloads] == ["v1"]
        await process.look()
        assert process.versions == [1, None]


async def test_an_engine_that_is_unsuitable_stops_the_start(stage: Stage):
    process = Process(stage.database, stage.url, stage.engines)
    process.unsuitable = stage.engines[1].url
    try:
        with pytest.raises(EngineUnsuitable, match="raw logprobs"):
            await process.reloader.start()
    finally:
        process.pool.close()
        await process.writer.close()


async def test_a_canary_is_begun_and_called_off_by_a_pin_or_by_taking_away_its_share(stage: Stage):
    """Tried beside the served adapter; a person's pin serves a version to all, and no share means no trial."""
    async with stage.process(canary_share=0.5) as process:
        stage.publish(1, PolicyKind.LORA)
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, 1], ["active"])
        stage.publish(2, PolicyKind.LORA)
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, 1], ["active", "canary"])
        assert [sorted(engine.adapters) for engine in process.pool.engines] == [[1, 2], [1, 2]]
        stage.pin(1)
        await process.follow()
        assert stage.statuses() == ["active", "published"]
        stage.pin(None)
        await process.follow()
        assert stage.statuses() == ["active", "canary"]
    async with stage.process() as process:
        await process.follow()
        assert (stage.statuses(), process.pool.trial) == (["active", "published"], None)
        await process.follow()
        assert (process.versions, stage.statuses()) == ([2, 2], ["retired", "active"])


def versions_sampled(pool: EnginePool) -> set[int]:
    """Return the versions that calls of many sessions would get now."""
    return {pool.lane(Session(session_id=f"s{number}")).version for number in range(64)}


async def test_whole_weights_get_no_call_before_it_is_known_which_sessions_try_them(stage: Stage, monkeypatch):
    """However long it takes from the exchange to the trial, and however often it is begun, nobody falls between."""
    sampled: list[set[int]] = []
    drifted, do = Canary._drifted, Writer.do

    async def slowly(canary: Canary, policy: PolicyVersion) -> str | None:
        sampled.append(versions_sampled(process.pool))
        return await drifted(canary, policy)

    async def failing_once(writer: Writer, function: Any, *arguments: Any, **options: Any) -> Any:
        if function is policies.try_policy and len(sampled) == 1:
            raise StoreUnavailable("the database is away")
        return await do(writer, function, *arguments, **options)

    monkeypatch.setattr(Canary, "_drifted", slowly)
    monkeypatch.setattr(Writer, "do", failing_once)
    async with stage.process(canary_share=0.5) as process:
        stage.publish(1)
        await process.follow()
        stage.publish(2)
        with pytest.raises(StoreUnavailable):
            await process.follow()
        assert versions_sampled(process.pool) == {1}
        await process.follow()
        assert sampled == [{1}, {1}]
        assert (process.versions, stage.statuses()) == ([1, 2], ["active", "canary"])
        assert not any(engine.draining for engine in process.pool.engines)


@pytest.mark.parametrize("pinned", [1, 2])
async def test_an_engine_that_was_held_back_for_a_trial_gets_calls_again_when_there_is_none(
    stage: Stage, monkeypatch, pinned: int
):
    async def failing(canary: Canary, policy: PolicyVersion) -> str | None:
        raise StoreUnavailable("the database is away")

    monkeypatch.setattr(Canary, "_drifted", failing)
    async with stage.process(canary_share=0.5) as process:
        stage.publish(1)
        await process.follow()
        stage.publish(2)
        with pytest.raises(StoreUnavailable):
            await process.follow()
        assert [engine.draining for engine in process.pool.engines] == [False, True]
        stage.pin(pinned)
        await process.follow()
        assert process.versions == [pinned, pinned]
        assert not any(engine.draining for engine in process.pool.engines)


async def test_the_first_version_of_all_is_not_tried_but_served(stage: Stage):
    """There is nothing to compare it with."""
    async with stage.process(canary_share=0.5) as process:
        stage.publish(1)
        await process.follow()
        assert stage.statuses() == [PolicyStatus.ACTIVE.value]
