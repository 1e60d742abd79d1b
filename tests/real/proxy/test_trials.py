"""Arms of a policy's sessions: the hold-out with its lift, and a trial in a proxy of two workers, driven by one."""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator

import pytest
from support.ledger_samples import make_turn
from support.reload_stage import Process, Stage
from support.waiting import WAIT_SECONDS

from proxy.engines.engine import EngineState
from proxy.features.arms.verdict import lift
from proxy.reload.parts import CORE
from turnwise.features.arms import Arm, activate_version
from turnwise.store import serving, turns, versions
from turnwise.store.rewards import add_rewards
from turnwise.store.sessions import create_session, end_session, read_session
from turnwise.types import PolicyKind, Reward, Session, Split, Turn

SHARE = 0.5


@pytest.mark.parametrize("kind", [PolicyKind.FULL, PolicyKind.LORA])
async def test_a_share_of_the_sessions_stays_on_the_version_before_while_newer_ones_are_served(stage, kind):
    """Whole weights keep one of two engines for it. A held-out session is not trained; one of a group is not taken."""
    async with stage.process(holdout_share=SHARE) as process:
        await process.serve(1, 2, 3, kind=kind)
        assert stage.statuses() == ["holdout", "retired", "active"]
        held, others = await process.open_sessions("s")
        assert len(held) > 2
        assert len(others) > 2
        assert {(one.arm, one.split) for one in held} == {(1, Split.EVAL)}
        assert await process.versions_of(held) == {1}
        assert await process.versions_of(others) == {3}
        groups = [
            await process.writer.open(Session(session_id=f"g{n}", group_id="g", group_size=16)) for n in range(16)
        ]
        assert {(one.arm, one.split) for one, _ in groups} == {(None, Split.TRAIN)}
        if kind is PolicyKind.FULL:
            assert sorted(process.versions) == [1, 3]
        await process.serve(4, kind=kind)
        assert stage.statuses() == ["holdout", "retired", "retired", "active"]
        assert await process.versions_of(held) == {1}
        assert await process.versions_of(others) == {4}


@pytest.mark.parametrize("parts", [None, CORE])
@pytest.mark.parametrize("kind", [PolicyKind.LORA, PolicyKind.FULL])
async def test_by_default_and_without_the_feature_every_session_samples_with_the_newest_version(stage, kind, parts):
    async with stage.process(parts=parts) as process:
        await process.serve(1, 2, kind=kind)
        assert stage.statuses() == ["retired", "active"]
        taken, others = await process.open_sessions("s")
        assert (taken, await process.versions_of(others), process.versions) == ([], {2}, [2, 2])


async def test_a_hold_out_ends_without_its_share_or_when_its_version_is_served_again(stage):
    async with stage.process(holdout_share=SHARE) as process:
        await process.serve(1, 2)
        assert stage.statuses() == ["holdout", "active"]
        stage.pin(1)
        await process.follow()
        assert stage.statuses() == ["active", "retired"]
        assert process.versions == [1, 1]
        stage.pin(None)
        await process.follow()
        assert stage.statuses() == ["holdout", "active"]
    async with stage.process(holdout_share=0.0) as process:
        await process.follow()
        await process.follow()
        assert stage.statuses() == ["retired", "active"]
        assert process.versions == [2, 2]


async def test_one_engine_with_whole_weights_has_no_hold_out(stage):
    stage.engines.pop()
    async with stage.process(holdout_share=SHARE) as process:
        await process.serve(1, 2)
        assert stage.statuses() == ["retired", "active"]


async def test_an_engine_that_takes_no_adapters_any_more_is_not_admitted_for_a_held_out_base(stage):
    """It has the base, which some sessions stay on, and the calls of all others would fail on it."""
    async with stage.process(holdout_share=SHARE) as process:
        with stage.database.write() as connection:
            base = dataclasses.replace(process.pool.engines[1].own_model, model_digest="0" * 64)
            versions.publish_version(connection, base)
        await process.follow()
        await process.serve(1, kind=PolicyKind.LORA)
        assert stage.statuses() == ["holdout", "active"]
        restarted = stage.engines[1].state
        restarted.adapters.clear()
        restarted.script.lora = False
        process.pool.engines[1].take_out("it was restarted")
        await process.look()
        assert [engine.is_serving for engine in process.pool.engines] == [True, False]
        assert "--lora" in (process.pool.engines[1].problem or "")
        restarted.script.lora = True
        await process.look()
        assert process.versions == [1, 1]


@pytest.mark.parametrize(
    ("gain", "statuses"), [(1.0, ["holdout", "retired", "active"]), (9.0, ["retired", "holdout", "active"])]
)
async def test_the_lift_over_the_hold_out_is_stored_and_one_that_is_certain_moves_it_on(
    stage, monkeypatch, gain, statuses
):
    """With 8 sessions a side or so the interval is about ± 1.3; a session of a group counts for neither side."""
    monkeypatch.setattr("proxy.features.arms.trials.LIFT_SECONDS", 0.0)
    monkeypatch.setattr("proxy.features.arms.verdict.MIN_NUM", 2)
    async with stage.process(holdout_share=SHARE) as process:
        await process.serve(1, 2)
        held, others = await process.open_sessions("s")
        with stage.database.write() as conn:
            grouped = create_session(conn, Session(session_id="g", group_id="g", group_size=2))[0]
            for sessions, values in ((held, (0.0, 1.0)), ([*others, grouped], (gain, gain + 1))):
                for number, session in enumerate(sessions):
                    version = await process.version_of(session)
                    turn = _turn(session.session_id, version)
                    turns.append_turns(conn, [turn])
                    rewards = [("reward", values[number % 2]), ("stars", 0.0)]
                    lines = [Reward(session_id=session.session_id, name=name, value=value) for name, value in rewards]
                    add_rewards(conn, lines)
                    end_session(conn, "default", session.session_id)
        await process.follow()
        with stage.database.read() as conn:
            arms = versions.get_version(conn, 2).arms
            assert read_session(conn, "default", held[0].session_id).reward is not None
    assert (arms["canary"]["version"], arms["control"]["version"]) == (2, 1)
    assert (arms["canary"]["num_sessions"], arms["control"]["num_sessions"]) == (len(others), len(held))
    assert set(arms["lift"]) == {"reward", "stars"}
    assert arms["lift"]["reward"]["low"] < arms["lift"]["reward"]["mean"] < arms["lift"]["reward"]["high"]
    async with stage.process(holdout_share=SHARE) as process:
        await process.serve(3)
        assert stage.statuses() == statuses


def _turn(session_id: str, version: int) -> Turn:
    turn = make_turn("t1", session_id=session_id, policy_version_first=version, policy_version_last=version)
    return dataclasses.replace(turn, turn_id=f"t-{session_id}")


def test_the_interval_of_a_lift_is_that_of_the_confidence_sequence():
    """By hand, for 8 rewards each, 4 of them 1: both variances are 2/7, s = √(2 · (2/7) / 8) = 0.26726.

    ρ² = (2 · 2.99573 + log 5.99146 + 1) / 500 = (5.99146 + 1.79033 + 1) / 500 = 0.0175636, n ρ² = 16 · 0.0175636 =
    0.281017. √(2 · 1.281017 / 0.281017 · log(√1.281017 / 0.05)) = √(9.11702 · (0.123831 + 2.995732)) = 5.33300.
    """
    rewards = (0.0, 1.0) * 4
    found = lift(Arm(rewards, by_name={"reward": rewards}), Arm(rewards, by_name={"reward": rewards}))
    assert found["reward"]["mean"] == 0.0
    assert found["reward"]["high"] == pytest.approx(0.26726 * 5.33300, rel=1e-4)
    assert found["reward"]["low"] == -found["reward"]["high"]
    few = Arm(rewards[:7], by_name={"reward": rewards[:7]})
    assert lift(few, few) == {}


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
async def test_a_session_of_a_trial_gets_its_version_at_a_worker_that_has_not_read_of_the_trial(stage, kind):
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
async def test_no_worker_serves_a_trial_that_another_has_ended(stage, is_good):
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


async def test_no_call_outside_a_trial_of_whole_weights_samples_with_them(stage):
    """At the other worker a call runs on the engine of the trial, so the load waits until the call has ended."""
    async with two_workers(stage, PolicyKind.FULL) as (driver, other), asyncio.timeout(WAIT_SECONDS):
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
async def test_a_trial_that_has_lost_an_engine_waits_and_then_ends(stage, monkeypatch, lost):
    """Otherwise all later versions would wait for an engine that may never come back."""
    monkeypatch.setattr("proxy.features.arms.trials.JUDGE_SECONDS", 0.0)
    async with on_trial(stage) as driver:
        assert driver.versions == [1, 2]
        driver.pool.engines[lost].change(EngineState.ABSENT)
        for _ in range(3):
            await driver.follow()
        assert stage.statuses() == ["active", "canary"]
        assert "version 2 waits for an engine" in (driver.reloader.problem or "")
        taken, _ = await driver.open_sessions("waiting")
        assert taken == []
        monkeypatch.setattr("proxy.features.arms.trials.ENGINE_SECONDS", 0.0)
        await driver.follow()
        assert stage.statuses() == ["active", "published"]
        assert driver.versions[1 - lost] == 1
        await driver.follow()
        assert stage.statuses() == ["retired", "active"]
        assert (driver.versions[1 - lost], driver.reloader.problem) == (2, None)


async def test_an_adapter_is_promoted_at_every_worker_by_the_same_transaction(stage, monkeypatch):
    """Before it no session outside the trial samples with the new version, also not at the driver."""
    monkeypatch.setattr("proxy.features.arms.trials.JUDGE_SECONDS", 0.0)
    async with stage.process(
        canary_share=0.5, canary_min_sessions=2, canary_max_sessions=2, holdout_share=0.0
    ) as driver:
        await driver.serve(1, kind=PolicyKind.LORA)
        await driver.serve(2, kind=PolicyKind.LORA)
        taken, control = await driver.open_sessions("s")
        write, seen = driver.reloader.lease.write, []

        async def written(change: object, *arguments: object) -> object:
            if change is activate_version:
                seen.append(await driver.versions_of(control))
            return await write(change, *arguments)

        monkeypatch.setattr(driver.reloader.lease, "write", written)
        monkeypatch.setattr("turnwise.features.arms.arms_since", equal_arms)
        await driver.follow()
        assert (seen, stage.statuses()) == ([{1}], ["retired", "active"])
        assert await driver.versions_of(taken + control) == {2}


def equal_arms(*_: object) -> tuple[Arm, Arm]:
    return Arm(num_sessions=2), Arm(num_sessions=2)
