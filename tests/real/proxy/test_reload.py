"""One round of the reloader, step by step: over a real store and fake engines that record what they load."""

import asyncio
import dataclasses
import errno
import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from support import stalled_files
from support.ports import free_port
from support.reload_stage import Stage
from support.tiny_checkpoints import FACTORS, write_probe
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import running_fake_engine

from proxy.engines.engine import LOADING, Engine, EngineState
from proxy.engines.pool import EnginePool
from proxy.reload.checkpoint import check_version, own_model
from proxy.reload.lease import LEASE, LEASE_SECONDS
from turnwise.errors import LeaseLost, ReloadFailed, StoreError, StoreUnavailable
from turnwise.features import transfers
from turnwise.features.arms import canary_of
from turnwise.store import leases, serving, versions
from turnwise.store.database import Connection
from turnwise.types import DEFAULT_POLICY, PolicyKind, Session


async def test_a_file_system_that_does_not_answer_for_an_engines_own_model_holds_up_no_round(
    stage, monkeypatch, tmp_path
):
    """The proxy did not start, and the engines and policies were not looked at any more."""
    answered = tmp_path / "answered"
    read = functools.partial(stalled_files.stalling, "", answered, own_model)
    monkeypatch.setattr("proxy.reload.driver.own_model", read)
    monkeypatch.setattr("proxy.reload.driver.OWN_MODEL_SECONDS", 0.01)
    try:
        async with asyncio.timeout(WAIT_SECONDS), stage.process() as process:
            assert process.versions == [None, None]
            assert all("have been read for" in engine.problem for engine in process.pool.engines)
            answered.touch()
            while None in process.versions:
                await process.look()
            assert process.versions == [0, 0]
    finally:
        answered.touch()


@pytest.mark.parametrize(("num_errors", "status"), [(2, "active"), (3, "failed")])
@pytest.mark.parametrize("share", [0.0, 0.5])
async def test_a_read_error_of_a_header_is_tried_again_before_it_fails_the_version(
    stage, monkeypatch, tmp_path, share, num_errors, status
):
    """Also where the version is to be tried by a share of the sessions first."""
    monkeypatch.setattr("proxy.reload.rollout.RETRY_LOAD_SECONDS", 0.05)
    left = tmp_path / "left"
    left.write_text(str(num_errors))
    failing = functools.partial(stalled_files.failing_to_open, "v2", left, errno.EIO, check_version)
    monkeypatch.setattr("proxy.reload.loader.check_version", failing)
    async with stage.process(canary_share=share) as process, asyncio.timeout(WAIT_SECONDS):
        await process.serve(1)
        stage.publish(2)
        while stage.statuses()[1] == "published":
            await process.follow()
            await asyncio.sleep(0.02)
    expected = "canary" if share and status == "active" else status
    assert (stage.statuses()[1], left.read_text()) == (expected, "0")


async def test_a_proxy_that_starts_while_the_directory_of_version_0_stalls_serves_it_and_newer_versions(
    stage, monkeypatch, tmp_path
):
    """The engines' labels say what they have loaded, so nothing has to be read before calls are served."""
    monkeypatch.setattr("proxy.reload.loader.PATIENCE_SECONDS", 0.05)
    async with stage.process() as process:
        await process.serve(0)
        assert (process.versions, stage.statuses()) == ([0, 0], ["active"])
    answered, is_dir, asked = tmp_path / "answered", Path.is_dir, []
    for name in ("reload.driver.own_model", "reload.loader.check_version", "features.probes.read_probe"):
        module, _, function = name.rpartition(".")
        read = getattr(importlib.import_module(f"proxy.{module}"), function)
        stalled = functools.partial(stalled_files.stalling, "/v0'", answered, read)
        monkeypatch.setattr(f"proxy.{name}", stalled)

    def noting(self: Path, **kwargs: bool) -> bool:
        asked.append(self.name)
        return is_dir(self, **kwargs)

    monkeypatch.setattr(Path, "is_dir", noting)
    try:
        async with stage.process() as process, asyncio.timeout(WAIT_SECONDS):
            assert process.versions == [0, 0]
            await process.serve(1)
            assert (process.versions, stage.statuses()) == ([1, 1], ["retired", "active"])
        assert "v0" not in asked, "the event loop reads no version's directory"
    finally:
        answered.touch()


@pytest.mark.parametrize(("num_failures", "status"), [(1, "active"), (2, "active"), (3, "failed")])
async def test_a_load_that_the_engine_answers_with_500_is_tried_three_times(stage, monkeypatch, num_failures, status):
    """One short lack of memory must not mark the version failed for good."""
    monkeypatch.setattr("proxy.reload.rollout.RETRY_LOAD_SECONDS", 0.05)
    left = [num_failures]

    def has_weights(directory: Path) -> bool:
        left[0] -= directory.name == "v1"  # but not when the last good version is restored
        return left[0] < 0

    monkeypatch.setattr("turnwise_fake_engine.control.has_weights", has_weights)
    async with stage.process() as process, asyncio.timeout(WAIT_SECONDS):
        stage.publish(1)
        while stage.statuses() == ["published"]:
            await process.follow()
            await asyncio.sleep(0.02)
        assert stage.statuses() == [status]
        assert process.versions == ([1, 1] if status == "active" else [0, 0])


def steal_lease(stage: Stage, token: int | None) -> None:
    assert token is not None
    with stage.database.write() as connection:
        leases.renew_lease(connection, LEASE, token, 0)
        assert leases.acquire_lease(connection, LEASE, "another", LEASE_SECONDS) == token + 1


async def test_a_driver_that_lost_the_lease_is_stopped_at_the_next_renewal_and_writes_nothing(stage):
    """Without this check the loss is noticed after the loads, which then run concurrently with the new driver's."""
    async with stage.process() as process:
        stage.publish(1)
        with stage.database.read() as connection:
            target = versions.get_version(connection, 1)

        async def drive() -> None:
            async with process.reloader.lease.held():
                steal_lease(stage, process.reloader.lease.token)
                await asyncio.sleep(WAIT_SECONDS)  # the loss cancels it; a time-out would look the same

        with pytest.raises(LeaseLost, match="another process may drive"):
            await drive()
        with pytest.raises(LeaseLost, match="no longer holds"):
            await process.reloader._default.succeed(target, 0.0)
        assert stage.statuses() == ["published"]


async def until(is_reached: Callable[[], bool]) -> None:
    while not is_reached():  # noqa: ASYNC110  the test has a deadline
        await asyncio.sleep(0.01)


async def test_the_lease_is_shared_until_a_driver_waits_for_it_and_its_loss_stops_all_who_share_it(stage):
    """Otherwise engines that come one after another would keep a new version from being loaded at all."""
    async with stage.process() as process, asyncio.timeout(WAIT_SECONDS):
        lease, order, ends = process.reloader.lease, list[str](), asyncio.Event()

        async def hold(how: Callable[[], AbstractAsyncContextManager[bool]], name: str) -> None:
            async with how() as is_driver:
                assert is_driver
                order.append(name)
                await (asyncio.Event() if name == "lost" else ends).wait()

        def begin(*named: str) -> list[asyncio.Task[None]]:
            hows = (lease.held if name == "driver" else lease.shared for name in named)
            return [asyncio.create_task(hold(*each)) for each in zip(hows, named, strict=True)]

        held = begin("one", "two")
        await until(lambda: len(order) == 2)
        held += begin("driver", "late")
        await asyncio.sleep(0)
        assert order == ["one", "two"]
        ends.set()
        await asyncio.gather(*held)
        assert order[2:] == ["driver", "late"]
        lost = begin("lost", "lost")
        await until(lambda: len(order) == 6)
        steal_lease(stage, lease.token)
        for error in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(error, LeaseLost)


async def test_who_shares_a_lost_lease_stops_before_the_store_answers_and_nobody_joins_meanwhile(stage, monkeypatch):
    """The store falls silent, so nobody knows whether another process drives already."""
    async with stage.process() as process, asyncio.timeout(WAIT_SECONDS):
        lease, answers, has_stopped, order = process.reloader.lease, asyncio.Event(), asyncio.Event(), list[str]()
        change = lease._change

        async def silent(*arguments):
            await answers.wait()
            return await change(*arguments)

        async def drive() -> None:
            async with lease.shared():
                order.append("drives")
                try:
                    await asyncio.Event().wait()
                finally:
                    order.append("stops")
                    await has_stopped.wait()

        async def join() -> None:
            async with lease.shared():
                order.append("joins")

        driving = asyncio.create_task(drive())
        await until(lambda: order == ["drives"])
        monkeypatch.setattr(lease, "_change", silent)
        await until(lambda: order == ["drives", "stops"])
        joining = asyncio.create_task(join())
        has_stopped.set()
        await asyncio.sleep(0)
        assert not joining.done()
        answers.set()
        await joining
        assert order == ["drives", "stops", "joins"]
        with pytest.raises(LeaseLost):
            await driving


async def test_a_result_is_refused_in_the_transaction_when_the_lease_was_lost_before_the_next_renewal(
    stage, monkeypatch
):
    monkeypatch.setattr("proxy.reload.lease.RENEW_SECONDS", WAIT_SECONDS)
    async with stage.process() as process:
        stage.publish(1)
        await process.writer.do(serving.serving_states)  # the writing process has started
        async with process.reloader.lease.held():
            steal_lease(stage, process.reloader.lease.token)
            with pytest.raises(LeaseLost):
                await process.reloader.lease.write(serving.fail_version, 1, "from the deposed driver")
        assert stage.statuses() == ["published"]


async def test_an_engine_that_returned_with_other_weights_gets_no_call_before_it_has_the_active_version(stage):
    """A restarted engine has its original weights and no label; one whose driver died during a load has no version."""
    async with stage.process() as process:
        await process.serve(1)
        for label in ("default", LOADING):
            engine = stage.engines[1].state
            engine.weights_path, engine.weight_version = engine.model_path, label
            engine.running.clear()
            await process.look()
            assert process.versions == [1, 1]
            assert (Path(engine.weights_path).name, engine.weight_version) == ("v1", "1")
            assert engine.running.is_set()
        assert stage.loads == [["v1"], ["v1"] * 3]


async def test_an_engine_that_hangs_in_its_first_chat_holds_up_no_other_engine_and_no_new_version(stage, monkeypatch):
    """It has the right label, and nobody serves; the other one has to load its weights again."""
    async with stage.process() as process, asyncio.timeout(WAIT_SECONDS):
        await process.serve(1)
        hanging, other = process.pool.engines
        answers = asyncio.Event()

        async def check(engine: Engine) -> None:
            if engine is hanging:
                await answers.wait()

        monkeypatch.setattr(process.reloader, "_check_engine", check)
        hanging.take_out("it is checked again")
        other.take_out("it is checked again")
        await other.label_weights(LOADING)
        running = asyncio.create_task(process.reloader.run())
        for number in (1, 2):
            await until(lambda: process.versions == [None, number])  # noqa: B023
            if number == 1:
                stage.publish(2)
        answers.set()
        await until(lambda: process.versions == [2, 2])
        running.cancel()
        await asyncio.wait({running})
        assert stage.loads[1] == ["v1", "v1", "v2"]


async def test_an_engine_gets_no_call_before_it_has_the_version_that_became_active_while_it_was_checked(
    stage, monkeypatch
):
    async with stage.process() as process:
        await process.serve(1)

        async def check(_: Engine) -> None:
            await process.serve(2)

        monkeypatch.setattr(process.reloader, "_check_engine", check)
        process.pool.engines[1].take_out("it is checked again")
        await process.look()
        assert process.versions == [2, 2]
        assert stage.loads == [["v1", "v2"]] * 2


async def test_an_engine_that_a_dead_driver_left_paused_with_the_active_version_is_resumed(stage):
    stage.publish(1)
    async with stage.process() as process:
        await process.follow()
    engine = stage.engines[1].state
    engine.running.clear()
    async with stage.process() as process:
        assert process.versions == [1, 1]
        assert engine.running.is_set()


@pytest.mark.parametrize("kind", PolicyKind)
async def test_an_engine_that_computes_something_else_than_was_published_gets_no_calls_until_it_loads_it_right(
    stage, kind
):
    """The other engine shows that the version is good. The label or the adapter's name must not admit it again."""
    async with stage.process() as process:
        write_probe(Path(stage.publish(1, kind)))
        stage.engines[1].state.script.logprob_shifts = {"v1": -3.0}
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, None], ["active"])
        for _ in range(2):
            await process.look()
            assert process.versions == [1, None]
            assert "nats from the checkpoint's own probe" in (process.pool.engines[1].problem or "")
        stage.engines[1].state.script.logprob_shifts = {}
        await process.look()
        assert process.versions == [1, 1]


async def test_an_engine_whose_last_good_version_cannot_be_restored_while_the_store_is_away_gets_no_calls(
    stage, monkeypatch
):
    """It is paused and has no version then; the next round restores it."""
    async with stage.process() as process:
        await process.serve(1)
        stage.publish(2)
        first, read = process.pool.engines[0], transfers.weight_urls

        def weight_urls(connection: Connection) -> list[str]:
            if first.state is EngineState.RELOADING and first.loaded_version is None:
                raise StoreUnavailable("the store does not answer")
            return read(connection)

        monkeypatch.setattr(transfers, "weight_urls", weight_urls)
        monkeypatch.setattr("turnwise_fake_engine.control.has_weights", lambda directory: directory.name != "v2")
        await process.follow()
        assert (process.versions, stage.statuses()) == ([None, 1], ["active", "published"])
        assert not stage.engines[0].state.running.is_set()
        await process.look()
        assert process.versions == [1, 1]
        assert stage.engines[0].state.running.is_set()


async def test_an_engine_that_is_down_is_skipped_and_added_when_it_is_up(stage):
    """At the start and later; the others keep serving."""
    port = free_port()
    stage.engines[1] = dataclasses.replace(stage.engines[1], url=f"http://127.0.0.1:{port}")
    async with stage.process() as process:
        assert process.versions == [0, None]
        first, second = process.pool.engines
        assert first.problem is None
        assert "cannot be reached" in (second.problem or "")
        await process.serve(1)
        assert (process.versions, stage.statuses()) == ([1, None], ["active"])
        with running_fake_engine(port=port) as started:
            await process.look()
            assert (process.versions, second.problem) == ([1, 1], None)
            assert [Path(path).name for path in started.state.reloads] == ["v1"]
        await process.look()
        assert process.versions == [1, None]
        assert "cannot be reached" in (second.problem or "")  # from the round on that takes it out


async def test_a_canary_is_started_and_is_cancelled_by_a_pin_or_by_a_share_of_zero(stage):
    """The trial runs beside the served adapter; a pin serves a version to all, and a share of zero means no trial."""
    async with stage.process(canary_share=0.5) as process:
        await process.serve(1, kind=PolicyKind.LORA)
        assert (process.versions, stage.statuses()) == ([1, 1], ["active"])
        await process.serve(2, kind=PolicyKind.LORA)
        assert (process.versions, stage.statuses()) == ([1, 1], ["active", "canary"])
        assert [sorted(engine.adapters) for engine in process.pool.engines] == [[1, 2], [1, 2]]
        stage.pin(1)
        await process.follow()
        assert stage.statuses() == ["active", "published"]
        stage.pin(None)
        await process.follow()
        assert stage.statuses() == ["active", "canary"]
    async with stage.process(holdout_share=0.0) as process:
        await process.follow()
        assert (stage.statuses(), canary_of(process.pool.served[DEFAULT_POLICY])) == (["active", "published"], None)
        await process.follow()
        assert (process.versions, stage.statuses()) == ([2, 2], ["retired", "active"])


def versions_sampled(pool: EnginePool) -> set[int]:
    return {pool.lane(Session(session_id=f"s{number}")).version for number in range(64)}


async def test_whole_weights_get_no_call_before_the_sessions_of_the_trial_are_chosen(stage):
    """An engine may hold the weights of the trial already: its start failed, and the next attempt succeeds."""
    async with stage.process(canary_share=0.5) as process:
        await process.serve(1)
        stage.publish(2)
        with stage.rejecting_trials():
            for _ in range(2):
                with pytest.raises(StoreError):
                    await process.follow()
                assert stage.loads[1] == ["v1", "v2"]
                assert versions_sampled(process.pool) == {1}
        await process.follow()
        assert (process.versions, stage.statuses()) == ([1, 2], ["active", "canary"])
        assert not any(engine.state is EngineState.DRAINING for engine in process.pool.engines)


@pytest.mark.parametrize("pinned", [1, 2])
async def test_an_engine_reserved_for_a_trial_gets_calls_again_when_there_is_no_trial(stage, pinned):
    async with stage.process(canary_share=0.5) as process:
        await process.serve(1)
        stage.publish(2)
        with stage.rejecting_trials(), pytest.raises(StoreError):
            await process.follow()
        assert [engine.state is EngineState.DRAINING for engine in process.pool.engines] == [False, True]
        stage.pin(pinned)
        for _ in range(2):  # the first one ends the trial that was prepared
            await process.follow()
        assert process.versions == [pinned, pinned]
        assert not any(engine.state is EngineState.DRAINING for engine in process.pool.engines)


async def test_a_restored_database_whose_version_has_other_files_is_not_served_by_what_its_engines_have(stage):
    """The name held the version alone; the adapter of the old files leaves the engine, one of a stranger stays."""
    async with stage.process() as process:
        await process.serve(1, kind=PolicyKind.LORA)
    before = [list(engine.state.adapters) for engine in stage.engines]
    stage.engines[0].state.adapters["policy-v1"] = "another's"
    write_probe(stage.directory / "v1")
    save_file(
        FACTORS | {"layer.lora_A.weight": np.ones((1, 1), np.float32)},
        stage.directory / "v1" / "adapter_model.safetensors",
    )
    async with stage.process() as process:
        lane = await process.pool.admit(Session(session_id="s"))
        assert lane.adapter not in before[0] + before[1]
        process.pool.release(lane)
        await process.look()
        assert process.versions == [1, 1]
        for engine, old in zip(stage.engines, before, strict=True):
            assert set(old).isdisjoint(engine.state.adapters)
        assert "policy-v1" in stage.engines[0].state.adapters


async def test_an_engine_that_serves_its_own_model_for_an_adapter_that_a_call_needs_is_found_by_the_probe(stage):
    """As with a version that is published: a call's load was not compared with the probe of its files."""
    async with stage.process() as process:
        await process.serve(1, kind=PolicyKind.LORA)
        write_probe(stage.directory / "v1", shift=3.0)
        for engine in stage.engines:
            engine.state.adapters.clear()
        lane = process.pool.lane(Session(session_id="s"))
        with pytest.raises(ReloadFailed, match="nats from the checkpoint's own probe"):
            await process.pool.load_again(lane)
        assert [engine.state.adapters for engine in stage.engines] == [{}, {}]
