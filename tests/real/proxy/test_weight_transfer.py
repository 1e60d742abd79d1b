"""Weights from a trainer's memory into engines: the whole protocol over sockets; the engines keep what arrives."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from support import dying_weights
from support.dying_weights import weights
from support.reload_stage import Stage, running_stage
from support.waiting import WAIT_SECONDS
from support.weights_in_memory import note_transfers
from turnwise_fake_engine import Script

from proxy.engines.engine import Engine, EngineState
from proxy.features.transfers import MemoryLoader
from trainer.features.transfers import HeldVersions
from trainer.features.transfers import server as weight_server
from trainer.features.transfers.server import WeightServer
from turnwise.engine_plugin import channel
from turnwise.engine_plugin.channel import TransferFailed
from turnwise.engine_plugin.receiver import Receiver
from turnwise.features import transfers
from turnwise.features.transfers import fail_unwritten
from turnwise.store.versions import publish_version
from turnwise.types import PolicyVersion

NO_PROBE = {"token_ids": [1], "logprobs": []}
FOUR_ENGINES = pytest.mark.parametrize("num_engines", [4])


@pytest.fixture
def num_engines() -> int:
    return 2


@pytest.fixture
def stage(tmp_path: Path, num_engines: int) -> Iterator[Stage]:
    with running_stage(tmp_path, *[Script(weight_transfer=True)] * num_engines) as stage:
        yield stage


@pytest.fixture
def trainer(stage: Stage) -> Iterator[WeightServer]:
    server = WeightServer(HeldVersions())
    announce(stage, server.url)
    yield server
    server.close()


def announce(stage: Stage, url: str | None) -> None:
    with stage.database.write() as connection:
        transfers.announce_weights(connection, "trainer", url, datetime.now(UTC))


def publish_unwritten(stage: Stage, version: int, *, digest: str | None = None) -> None:
    """Publish a trainer's version whose directory does not exist; with a digest, it is published as written."""
    made = PolicyVersion(
        version=version, path=str(stage.directory / f"v{version}"), update_id=version, weights_digest=digest
    )
    with stage.database.write() as connection:
        publish_version(connection, made)


@contextlib.contextmanager
def dying_trainer(stage: Stage, moment: str) -> Iterator[subprocess.Popen[str]]:
    """A trainer of versions 1 and 2 that kills itself at this moment of a transfer."""
    program = [sys.executable, dying_weights.__file__, stage.url, moment]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as sender:
        assert sender.stdout.readline() == "ready\n"
        yield sender


def assert_received(stage: Stage, version: int) -> None:
    for engine in stage.engines:
        assert engine.state.received.keys() == weights(version).keys()
        for name, expected in weights(version).items():
            assert engine.state.received[name].dtype == expected.dtype
            assert torch.equal(engine.state.received[name], expected)


async def test_engines_get_a_version_from_memory_while_they_take_calls_and_need_no_directory(
    stage, trainer, monkeypatch
):
    """Also an engine that was restarted, and ones whose driver died in the middle of an update."""
    states, send = [], MemoryLoader.send

    async def noted(self, offer, engine):
        is_sent = await send(self, offer, engine)
        states.append(engine.state)
        return is_sent

    monkeypatch.setattr(MemoryLoader, "send", noted)
    for engine in stage.engines:
        engine.state.is_updating = True
    async with stage.process() as process:
        for version in (1, 2):
            trainer.held.hold(version, weights(version), NO_PROBE)
            publish_unwritten(stage, version)
            await process.follow()
            assert process.versions == [version, version]
            assert_received(stage, version)
        assert states == [EngineState.READY] * 4
        assert stage.loads == [["memory:1", "memory:2"]] * 2
        assert stage.statuses() == ["retired", "active"]
        assert all(engine.state.running.is_set() for engine in stage.engines)
        restarted = stage.engines[0].state
        restarted.receiver, restarted.weight_version, restarted.received = None, "default", {}
        for _ in range(2):
            await process.look()
        assert process.versions == [2, 2]
        assert_received(stage, 2)


@pytest.fixture
def sent(monkeypatch) -> list[int]:
    """The numbers of workers of the transfers that trainers start."""
    return note_transfers(monkeypatch)


@FOUR_ENGINES
async def test_engines_that_need_a_version_at_the_same_time_get_it_from_one_another(stage, trainer, sent):
    """The first one gets it alone, and three at once; so do those that were restarted together."""
    async with stage.process() as process:
        for version in (1, 2):
            trainer.held.hold(version, weights(version), NO_PROBE)
            publish_unwritten(stage, version)
            await process.follow()
            assert process.versions == [version] * 4
            assert_received(stage, version)
        assert sent == [1, 3, 1, 3]
        for engine in stage.engines[:3]:
            engine.state.receiver, engine.state.weight_version, engine.state.received = None, "default", {}
        for _ in range(2):
            await process.look()
        assert process.versions == [2] * 4
        assert_received(stage, 2)
        assert sent == [1, 3, 1, 3, 3]


@FOUR_ENGINES
@pytest.mark.parametrize("fault", ["one refuses", "one is killed"])
async def test_engines_get_copies_of_their_own_where_they_cannot_receive_together(stage, trainer, fault, monkeypatch):
    bad, begin = stage.engines[3], Receiver.begin

    def refuse(self, info, worker):
        if info.first_rank == 3:
            if fault == "one is killed":
                bad.kill()
            raise TransferFailed("another release of the plug-in")
        begin(self, info, worker)

    async with stage.process() as process:
        trainer.held.hold(1, weights(1), NO_PROBE)
        stage.publish(1)
        with monkeypatch.context() as patched:
            patched.setattr(Receiver, "begin", refuse)
            await process.follow()
        others = [1, 1, 1, 1] if fault == "one refuses" else [1, 1, 1, None]
        assert process.versions == others
        assert [loads[-1:] for loads in stage.loads[:3]] == [["memory:1"]] * 3
        trainer.held.hold(2, weights(2), NO_PROBE)
        publish_unwritten(stage, 2)
        await process.follow()
        assert process.versions == [each and 2 for each in others]


@contextlib.contextmanager
def hanging_engine(monkeypatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Let one of three engines hang when it is asked to receive with others; yield that it does, and that it ends."""
    hangs, is_over, begin = threading.Event(), threading.Event(), Receiver.begin

    def hang(self, info, worker):
        if info.first_rank == 3:
            hangs.set()
            is_over.wait(WAIT_SECONDS)
            raise TransferFailed("it was asked long ago")
        begin(self, info, worker)

    monkeypatch.setattr(Receiver, "begin", hang)
    yield hangs, is_over
    is_over.set()


@FOUR_ENGINES
async def test_an_engine_that_hangs_holds_up_the_others_no_longer_than_their_trainer_waits(stage, trainer, monkeypatch):
    """They waited for `reload_timeout_seconds`, and none of them had the version then."""
    start, send, num_sent = WeightServer._start, MemoryLoader.send, 0

    def start_shortly(self, body):
        with monkeypatch.context() as patched:
            if body["num_workers"] > 1:
                patched.setattr(weight_server, "SILENCE_SECONDS", 0.5)
            return start(self, body)

    async def note_sent(self, offer, engine):
        nonlocal num_sent
        is_sent = await send(self, offer, engine)
        num_sent += is_sent
        if num_sent == 3:
            is_over.set()
        return is_sent

    monkeypatch.setattr(WeightServer, "_start", start_shortly)
    monkeypatch.setattr(MemoryLoader, "send", note_sent)
    with hanging_engine(monkeypatch) as (hangs, is_over):
        async with stage.process() as process:
            trainer.held.hold(1, weights(1), NO_PROBE)
            publish_unwritten(stage, 1)
            await process.follow()
            assert hangs.is_set()
            assert process.versions == [1, 1, 1, 1]


@FOUR_ENGINES
async def test_a_transfer_that_nobody_waits_for_any_more_is_called_off(stage, trainer, monkeypatch):
    """Its trainer and the engines that had come to it waited for a minute, and took no other."""
    with hanging_engine(monkeypatch) as (hangs, _):
        async with stage.process() as process:
            trainer.held.hold(1, weights(1), NO_PROBE)
            publish_unwritten(stage, 1)
            following = asyncio.create_task(process.follow())
            assert await asyncio.to_thread(hangs.wait, WAIT_SECONDS)
            following.cancel()
            await asyncio.wait({following})
            *_, transfer = trainer._transfers.values()
            await asyncio.to_thread(transfer.wait)
            assert transfer.error == "the transfer did not start: it was called off"


@pytest.mark.parametrize("info", [{}, {"vllm_config": "model='fake'"}, {"vllm_config": ["x"]}])
async def test_an_engine_that_does_not_say_how_it_was_started_gets_copies_of_its_own(stage, trainer, sent, info):
    async with stage.process() as process:
        for engine in process.pool.engines:
            engine.info = info
        trainer.held.hold(1, weights(1), NO_PROBE)
        publish_unwritten(stage, 1)
        await process.follow()
        assert process.versions == [1, 1]
        assert sent == [1, 1]


@pytest.mark.parametrize("answer", [None, "a page", [], {}, {"world_size": None}, {"world_size": 0}])
async def test_an_engine_that_does_not_say_how_many_workers_it_has_reads_directories(
    stage, trainer, monkeypatch, answer
):
    ask = Engine.ask

    async def odd(self, method, path, *of, **options):
        return answer if path == "/get_world_size" else await ask(self, method, path, *of, **options)

    monkeypatch.setattr(Engine, "ask", odd)
    trainer.held.hold(1, weights(1), NO_PROBE)
    async with stage.process() as process:
        await process.serve(1)
        assert process.versions == [1, 1]
        assert stage.loads == [["v1"], ["v1"]]


async def test_a_version_that_is_still_written_is_waited_for_where_no_trainer_hands_it_out(stage):
    async with stage.process() as process:
        publish_unwritten(stage, 1)
        for _ in range(2):
            await process.follow()
        assert (process.versions, stage.statuses()) == ([0, 0], ["published"])
        stage.publish(1)
        publish_unwritten(stage, 1, digest="of its files")
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, 1], ["active"])


async def test_engines_go_back_from_a_version_that_its_trainer_never_wrote(stage, trainer):
    """The trainer is killed before the directory is complete, and its next process gives the version up."""
    async with stage.process() as process:
        await process.serve(1)
        trainer.held.hold(2, weights(2), NO_PROBE)
        publish_unwritten(stage, 2)
        await process.follow()
        assert process.versions == [2, 2]
        with stage.database.write() as connection:
            assert fail_unwritten(connection, after=1) == [2]
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, 1], ["active", "failed"])
        assert stage.loads == [["v1", "memory:2", "v1"]] * 2


async def test_a_version_that_is_no_longer_in_memory_is_read_from_its_directory(stage, trainer):
    async with stage.process() as process:
        stage.publish(1)
        for version in (2, 3):
            trainer.held.hold(version, weights(version), NO_PROBE)
            publish_unwritten(stage, version)
        await process.follow()
        stage.pin(1)
        await process.follow()
        assert process.versions == [1, 1]
        assert stage.loads == [["memory:3", "v1"]] * 2


async def test_an_engine_without_the_backend_reads_directories(stage, trainer):
    trainer.held.hold(1, weights(1), NO_PROBE)
    for engine in stage.engines:
        engine.state.script.weight_transfer = False
    async with stage.process() as process:
        await process.serve(1)
        assert process.versions == [1, 1]
        assert stage.loads == [["v1"], ["v1"]]


async def test_without_a_trainer_and_without_a_directory_the_last_good_version_stays(stage, trainer):
    async with stage.process() as process:
        trainer.held.hold(1, weights(1), NO_PROBE)
        publish_unwritten(stage, 1)
        await process.follow()
        announce(stage, "http://127.0.0.1:9/key")  # nothing listens there
        publish_unwritten(stage, 2, digest="its files were removed")
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, 1], ["active", "failed"])
        assert_received(stage, 1)
        assert "is not a directory" in (process.reloader.problem or "")


@pytest.mark.parametrize(
    ("moment", "has_directory"),
    [
        pytest.param("asked for the version", True, marks=pytest.mark.slow),
        pytest.param("before it joins the group", False, marks=pytest.mark.slow),
        ("after a part of the weights", True),
        ("after the weights, before their check", False),
    ],
)
async def test_a_trainer_that_is_killed_while_it_sends_changes_nothing_that_is_served(stage, moment, has_directory):
    """The version is read from its directory, or waits for the trainer's next process, which writes it or gives it up.

    No engine ever pauses for a version that did not arrive.
    """
    async with stage.process() as process:
        await process.serve(1)
        with dying_trainer(stage, moment) as sender:
            stage.publish(2) if has_directory else publish_unwritten(stage, 2)
            await process.follow()
            assert sender.wait(WAIT_SECONDS) == -signal.SIGKILL
        served = 2 if has_directory else 1
        assert process.versions == [served, served]
        assert [loads[-1] for loads in stage.loads] == [f"v{served}"] * 2
        assert stage.statuses()[1] == ("active" if has_directory else "published")
        assert all(engine.state.running.is_set() and not engine.state.received for engine in stage.engines)


async def test_bytes_that_change_on_the_way_are_noticed_before_the_model_is_touched(stage, trainer, monkeypatch):
    original = channel.Channel.broadcast

    def corrupt(self: channel.Channel, buffer: torch.Tensor, chunk_bytes: int) -> None:
        original(self, buffer, chunk_bytes)
        if buffer.data_ptr() != trainer.held.find(1).buffer.data_ptr():
            buffer[100] ^= 1

    monkeypatch.setattr(channel.Channel, "broadcast", corrupt)
    trainer.held.hold(1, weights(1), NO_PROBE)
    async with stage.process() as process:
        await process.serve(1)
        assert stage.loads == [["v1"], ["v1"]]


def test_a_version_with_a_weight_that_is_not_finite_is_not_offered(trainer):
    assert not trainer.held.hold(1, {"w": torch.tensor([1.0, float("nan")])}, NO_PROBE)
    assert trainer.held.find(1) is None
