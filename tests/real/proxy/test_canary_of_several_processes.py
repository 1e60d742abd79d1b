"""A trial in a proxy of two workers: one drives it, and the other does not read the store at any interval.

So the other worker knows of the trial's start and end only what its calls and the messages of the driver make it read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from support.reload_stage import Process, Stage

from proxy.engines.engine import EngineState
from turnwise.store import serving
from turnwise.store.arms import Arm
from turnwise.types import PolicyKind


@contextlib.asynccontextmanager
async def two_workers(stage: Stage, kind: PolicyKind) -> AsyncIterator[tuple[Process, Process]]:
    async with stage.process(canary_share=0.5) as driver, stage.process(canary_share=0.5) as other:
        driver.others.append(other)
        await driver.serve(1, kind=kind)
        await other.follow()
        assert (driver.versions, other.versions) == ([1, 1], [1, 1])
        stage.publish(2, kind)
        yield driver, other


@contextlib.asynccontextmanager
async def on_trial(stage: Stage) -> AsyncIterator[Process]:
    """Start a proxy of one worker that serves version 1, with version 2 on trial."""
    async with stage.process(canary_share=0.5) as driver:
        await driver.serve(1, 2)
        yield driver


@pytest.mark.parametrize("kind", PolicyKind)
async def test_a_session_of_a_trial_gets_its_version_at_a_worker_that_has_not_read_of_the_trial(
    stage: Stage, kind: PolicyKind
):
    async with two_workers(stage, kind) as (driver, other):
        _, before = await driver.open_sessions("before")
        assert len(before) == 16
        await driver.follow()
        assert stage.statuses() == ["active", "canary"]
        taken, control = await driver.open_sessions("during")
        assert taken
        assert control
        for process in (other, driver):
            assert await process.versions_of(taken) == {2}
            assert await process.versions_of(control + before) == {1}


@pytest.mark.parametrize("is_good", [True, False])
async def test_no_worker_serves_a_trial_that_another_has_ended(stage: Stage, is_good: bool):
    """A session that has left the trial at one worker cannot return to it at another."""
    async with two_workers(stage, PolicyKind.LORA) as (driver, other):
        await driver.follow()
        taken, control = await driver.open_sessions("during")
        assert await other.versions_of(taken) == {2}
        with stage.database.write() as connection:
            if is_good:
                serving.activate_version(connection, 2)
            else:
                serving.fail_version(connection, 2, "rolled back as a canary")
        for process in (driver, other):
            assert await process.versions_of(taken + control) == {2 if is_good else 1}


async def test_no_call_outside_a_trial_of_whole_weights_samples_with_them(stage: Stage):
    """At the other worker a call runs on the engine of the trial, so the load waits until the call has ended."""
    async with two_workers(stage, PolicyKind.FULL) as (driver, other), asyncio.timeout(60):
        _, before = await driver.open_sessions("before")
        reserved = other.pool.engines[1]
        on_it = next(session for session in before if other.pool.lane(session).engine is reserved)
        lane = await other.pool.admit(on_it)
        beginning = asyncio.create_task(driver.follow())
        while reserved.state is not EngineState.DRAINING:  # noqa: ASYNC110  the state has no event
            await asyncio.sleep(0.01)
        assert stage.statuses() == ["active", "canary"]
        assert {other.pool.lane(session).engine.url for session in before} == {other.pool.engines[0].url}
        assert stage.loads == [["v1"], ["v1"]]
        other.pool.release(lane)
        await beginning
        assert stage.loads == [["v1"], ["v1", "v2"]]
        taken, control = await driver.open_sessions("during")
        assert await other.versions_of(taken) == {2}
        assert await other.versions_of(before + control) == {1}
        await other.follow()
        assert not any(engine.state is EngineState.DRAINING for engine in other.pool.engines)


@pytest.mark.parametrize("lost", [0, 1], ids=["the control's engine", "the trial's engine"])
async def test_a_trial_that_has_lost_an_engine_waits_and_then_ends(stage: Stage, monkeypatch, lost: int):
    """Otherwise all later versions would wait for an engine that may never come back."""
    monkeypatch.setattr("proxy.reload.arms.JUDGE_SECONDS", 0.0)
    async with on_trial(stage) as driver:
        assert driver.versions == [1, 2]
        driver.pool.engines[lost].change(EngineState.ABSENT)
        for _ in range(3):
            await driver.follow()
        assert stage.statuses() == ["active", "canary"]
        assert "version 2 waits for an engine" in (driver.reloader.problem or "")
        taken, _ = await driver.open_sessions("waiting")
        assert taken == []
        monkeypatch.setattr("proxy.reload.arms.ENGINE_SECONDS", 0.0)
        await driver.follow()
        assert stage.statuses() == ["active", "published"]
        assert driver.versions[1 - lost] == 1
        await driver.follow()
        assert stage.statuses() == ["retired", "active"]
        assert (driver.versions[1 - lost], driver.reloader.problem) == (2, None)


async def test_an_adapter_is_promoted_at_every_worker_by_the_same_transaction(stage: Stage, monkeypatch):
    """Before it no session outside the trial samples with the new version, also not at the driver."""
    monkeypatch.setattr("proxy.reload.arms.JUDGE_SECONDS", 0.0)
    async with stage.process(
        canary_share=0.5, canary_min_sessions=2, canary_max_sessions=2, holdout_share=0.0
    ) as driver:
        await driver.serve(1, kind=PolicyKind.LORA)
        await driver.serve(2, kind=PolicyKind.LORA)
        taken, control = await driver.open_sessions("s")
        write, seen = driver.reloader.lease.write, []

        async def written(change: object, *arguments: object) -> object:
            if change is serving.activate_version:
                seen.append(await driver.versions_of(control))
            return await write(change, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(driver.reloader.lease, "write", written)
        monkeypatch.setattr("turnwise.store.arms.arms_since", equal_arms)
        await driver.follow()
        assert (seen, stage.statuses()) == ([{1}], ["retired", "active"])
        assert await driver.versions_of(taken + control) == {2}


def equal_arms(*_: object) -> tuple[Arm, Arm]:
    return Arm(num_sessions=2), Arm(num_sessions=2)
