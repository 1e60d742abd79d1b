"""Weights through vLLM's own backends `nccl` and `ipc`: proxy and trainer against vLLM's classes, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from support.migrated import migrated
from support.reload_stage import Stage
from support.vllm_weights import FakeNccl, replace_devices, vllm_engine
from turnwise_fake_engine import Script, running_fake_engine

from trainer.publish import staged_transfer
from trainer.publish.weight_server import WeightRule, WeightServer
from turnwise.engine_plugin.layout import Layout
from turnwise.store import policies, weight_servers
from turnwise.store.database import Database
from turnwise.types import PolicyVersion

pytestmark = pytest.mark.engine  # imports vLLM

PROBE = {"token_ids": [1], "logprobs": []}


def weights(version: int) -> dict[str, torch.Tensor]:
    """Return a version's weights: three chunks of 1024 bytes and more."""
    generator = torch.Generator().manual_seed(version)
    shapes = {"embed": (48, 8), "layer.0.w": (24, 24), "layer.0.b": (24,), "layer.1.w": (20, 20), "norm": (8,)}
    return {name: torch.randn(*shape, generator=generator).bfloat16() for name, shape in shapes.items()}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> FakeNccl:
    monkeypatch.setattr(staged_transfer, "CHUNK_BYTES", 1024)
    return replace_devices(monkeypatch)


@pytest.fixture(params=["nccl", "ipc"])
def stage(request: pytest.FixtureRequest, tmp_path: Path, nccl: FakeNccl) -> Iterator[Stage]:
    """Two engines that were started with one of vLLM's backends."""
    url = f"sqlite:///{tmp_path}/turnwise.db"
    database = Database(migrated(url))
    script = Script(weight_transfer=True)
    with running_fake_engine(script) as first, running_fake_engine(script) as second:
        for engine in (first, second):
            engine.state.weight_engine = vllm_engine(request.param)
        yield Stage(database, url, [first, second], tmp_path)
    database.close()


@pytest.fixture
def trainer(stage: Stage) -> Iterator[WeightServer]:
    server = WeightServer(WeightRule(weight_seconds=60), torch.device("cpu"))
    with stage.database.write() as connection:
        weight_servers.announce_weights(connection, "trainer", server.url, datetime.now(UTC))
    yield server
    server.close()


def publish_unwritten(stage: Stage, version: int) -> None:
    """Publish a version whose directory does not exist."""
    with stage.database.write() as connection:
        policies.publish_policy(connection, PolicyVersion(version=version, path=str(stage.directory / f"v{version}")))


def assert_loaded(stage: Stage, version: int) -> None:
    for engine in stage.engines:
        loaded = engine.state.weight_engine.model.loaded
        assert loaded.keys() == weights(version).keys()
        assert all(torch.equal(loaded[name], value) for name, value in weights(version).items())


async def test_vllms_own_classes_load_each_version_bit_for_bit(stage: Stage, trainer: WeightServer):
    async with stage.process() as process:
        for version in (1, 2, 3):
            trainer.held.hold(version, weights(version), PROBE)
            publish_unwritten(stage, version)
            await process.follow()
            assert process.versions == [version, version]
            assert_loaded(stage, version)
    assert stage.loads == [[], []]


async def test_a_group_of_nccl_is_opened_once_for_each_engine(stage: Stage, trainer: WeightServer, nccl: FakeNccl):
    async with stage.process() as process:
        for version in (1, 2):
            trainer.held.hold(version, weights(version), PROBE)
            publish_unwritten(stage, version)
            await process.follow()
    is_nccl = "NCCL" in type(stage.engines[0].state.weight_engine).__name__
    assert (len(nccl.wires), nccl.aborted) == (2 if is_nccl else 0, 0)


async def test_an_update_that_fails_in_the_pause_is_read_from_the_directory(stage: Stage, trainer: WeightServer):
    """The half-loaded update is ended before the directory is read, and the next version is sent again."""
    for engine in stage.engines:
        engine.state.weight_engine.receive_weights = refuse
    async with stage.process() as process:
        trainer.held.hold(1, weights(1), PROBE)
        stage.publish(1)
        await process.follow()
        assert process.versions == [1, 1]
        assert stage.loads == [["v1"], ["v1"]]
        assert not any(engine.state.is_updating for engine in stage.engines)
        for engine in stage.engines:
            del engine.state.weight_engine.receive_weights
        trainer.held.hold(2, weights(2), PROBE)
        publish_unwritten(stage, 2)
        await process.follow()
        assert process.versions == [2, 2]
        assert_loaded(stage, 2)


async def test_an_update_that_fails_without_a_directory_leaves_the_last_good_version(
    stage: Stage, trainer: WeightServer
):
    async with stage.process() as process:
        stage.publish(1)
        await process.follow()
        for engine in stage.engines:
            engine.state.weight_engine.receive_weights = refuse
        trainer.held.hold(2, weights(2), PROBE)
        publish_unwritten(stage, 2)
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, 1], ["active", "failed"])
        assert {loads[-1] for loads in stage.loads} == {"v1"}


async def test_an_engine_that_was_restarted_joins_a_new_group(stage: Stage, trainer: WeightServer):
    async with stage.process() as process:
        for version in (1, 2):
            trainer.held.hold(version, weights(version), PROBE)
        publish_unwritten(stage, 1)
        await process.follow()
        for engine in stage.engines:
            engine.state.weight_engine = vllm_engine("nccl")
            engine.state.weight_version = "default"
        await process.look()
        await process.look()
        assert process.versions == [1, 1]
        assert_loaded(stage, 1)


async def test_a_trainer_without_a_gpu_lets_engines_read_directories(
    stage: Stage, trainer: WeightServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(trainer._staged, "_device", None)
    async with stage.process() as process:
        trainer.held.hold(1, weights(1), PROBE)
        stage.publish(1)
        await process.follow()
        assert stage.loads == [["v1"], ["v1"]]
    assert "the trainer has no GPU" in caplog.text


def test_a_chunk_ends_with_the_tensor_that_exceeds_its_size():
    """Of 100, 300, 600, 50 and 40 bytes: 100 + 300 + 600 exceeds 900, the rest does not."""
    slots = Layout.of({str(size): torch.zeros(size, dtype=torch.uint8) for size in (100, 300, 600, 50, 40)}).slots
    names = [[slot.name for slot in chunk] for chunk in staged_transfer.cut(slots, 900)]
    assert names == [["100", "300", "600"], ["50", "40"]]


def refuse(_update: object) -> None:
    raise RuntimeError("out of memory")
