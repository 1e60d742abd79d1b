"""Engines free their memory while a trainer computes, keep their calls, and wake when it has computed or dies."""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime

import pytest
import pytest_asyncio
from support.reload_stage import Process, Stage, running_stage
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Script

from trainer.features.transfers import HeldVersions
from trainer.features.transfers.server import WeightServer
from turnwise.features import transfers


@pytest.fixture
def stage(tmp_path) -> Iterator[Stage]:
    with running_stage(tmp_path, Script()) as stage:
        yield stage


@pytest_asyncio.fixture
async def process(stage: Stage) -> AsyncIterator[Process]:
    async with stage.process(engine_sleep=True) as process:
        await process.serve(1)
        assert process.versions == [1]
        yield process


class Trainer:
    def __init__(self, stage: Stage, level: int) -> None:
        self.server = WeightServer(HeldVersions())
        with stage.database.write() as connection:
            transfers.announce_weights(connection, "trainer", self.server.url, datetime.now(UTC))
        self._level = level
        self.computes, self._may_end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._compute, daemon=True)
        self._thread.start()

    def _compute(self) -> None:
        with self.server.engines_asleep(self._level):
            self.computes.set()
            self._may_end.wait(WAIT_SECONDS)

    def end(self) -> None:
        self._may_end.set()
        self._thread.join(WAIT_SECONDS)


async def follow_until_computing(process: Process, trainer: Trainer) -> None:
    async with asyncio.timeout(WAIT_SECONDS):
        while not trainer.computes.is_set():
            await process.follow()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("level", "reloads"), [(1, ["v1"]), (2, ["v1", "v1"])])
async def test_an_engine_sleeps_while_the_trainer_computes_and_wakes_with_the_served_version(
    stage, process, level, reloads
):
    """At level 2 its weights are lost, and loaded before sampling resumes. A call in between waits and is answered."""
    engine = stage.engines[0]
    trainer = Trainer(stage, level)
    await follow_until_computing(process, trainer)
    assert (engine.state.asleep, engine.state.sleep_levels) == ({"weights", "kv_cache"}, [level])
    body = {"model": engine.state.script.model, "messages": [{"role": "user", "content": "hello"}]}
    call = asyncio.create_task(process.pool.engines[0].ask("POST", "/v1/chat/completions", body, seconds=WAIT_SECONDS))
    stage.publish(2)
    await process.follow()  # no version is loaded into an engine that sleeps
    await process.look()
    assert process.versions == [1]  # and it is not taken for one that was restarted
    assert [path.rpartition("/")[2] for path in engine.state.reloads] == ["v1"]
    assert not call.done()
    trainer.end()
    with stage.database.write() as connection:
        connection.exec_driver_sql("UPDATE policy_versions SET status = 'failed' WHERE version = 2")
    await process.follow()
    assert engine.state.asleep == set()
    assert [path.rpartition("/")[2] for path in engine.state.reloads] == reloads
    assert process.pool.engines[0].loaded_version == 1
    assert (await call)["choices"][0]["message"]["content"]
    trainer.server.close()


@pytest.mark.parametrize("level", [1, 2])
async def test_an_engine_wakes_when_the_trainer_dies(stage, process, level):
    trainer = Trainer(stage, level)
    await follow_until_computing(process, trainer)
    trainer.server.close()  # what is left of a killed trainer: an address without an answer
    await process.follow()
    assert stage.engines[0].state.asleep == set()
    assert stage.engines[0].state.weight_version == "1"
    trainer.end()


async def test_a_proxy_that_finds_an_engine_asleep_wakes_it_once_no_trainer_needs_its_memory(stage, process):
    """The process before it was killed while the engine slept at level 2."""
    trainer = Trainer(stage, 2)
    await follow_until_computing(process, trainer)
    async with stage.process(engine_sleep=True) as restarted:
        assert restarted.versions == [None]
        assert stage.engines[0].state.asleep
        trainer.end()
        await restarted.look()
        assert restarted.versions == [1]
    assert stage.engines[0].state.asleep == set()
    trainer.server.close()
