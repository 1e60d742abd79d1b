"""The ledger as the trainer's source: claimed batches, and incomplete groups."""

import dataclasses
import threading
import time

import pytest
from support.algorithms import algorithm
from support.ledger_samples import add_finished, add_session, finish, groups_by_status, make_turn, update_record
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for
from support.waiting import WAIT_SECONDS, wait_until

from proxy.features.training_note import training_note
from trainer.algorithms.algorithm import select
from trainer.batch.batch import build
from trainer.batch.selection import SelectionRule
from trainer.claims.claims import Claims
from trainer.claims.ledger import RunProgress, TrainerProcess, outlast
from trainer.features import FEATURES, Settings
from trainer.workflows import OnPolicyWorkflow
from turnwise.errors import StoreUnavailable
from turnwise.features import rewinds
from turnwise.features.page import overview
from turnwise.store import claims, serving, sessions, versions
from turnwise.store.database import Database
from turnwise.store.rewards import add_rewards
from turnwise.store.trainer_reports import TrainerStatus
from turnwise.store.turns import append_turns
from turnwise.types import PolicyVersion, Reward, Role, Split

STALLED_SECONDS = 0.3
NOW = RunProgress(num_batches=1)
"""A run that is not at its first batch, which waits shorter."""


def source_for(database: Database, **changes) -> Claims:
    values = {
        "trainer_id": "t",
        "groups_per_batch": 1,
        "singles_per_group": 1,
        "wait_seconds": 0.0,
        "stalled_seconds": STALLED_SECONDS,
    }
    return Claims(database, Settings(**(values | changes)), holds=FEATURES.holds)


def play_incomplete_group(database: Database) -> None:
    """Write a group of three: one session with a reward, one without, one that was never created."""
    for session_id in ("finished", "unfinished"):
        add_session(database, session_id, group_id="g", group_size=3)
    finish(database, "finished")


def test_a_stalled_group_is_trained_on_its_finished_sessions(database):
    play_incomplete_group(database)
    batch = source_for(database, stalled_policy="train").next(NOW)
    assert [group.group_id for group in batch.claim.groups] == ["g"]
    assert [experience.session_id for experience in batch.experiences] == ["finished"]


@pytest.mark.parametrize("rule", [{}, {"unrewarded_seconds": 3600.0}, {"unrewarded_seconds": 0.0}])
def test_an_ended_session_without_a_reward_counts_as_failed_by_a_setting(database, rule):
    """Of a group of two, one has a reward. The other one holds the group until it ended, and for the set time."""
    for session_id in ("finished", "unrewarded"):
        add_session(database, session_id, group_id="g", group_size=2)
    finish(database, "finished")
    source = source_for(database, stalled_seconds=3600.0, **rule)
    assert source._supply(NOW).num_ready == 0
    with database.read() as connection:
        said = training_note(connection, sessions.read_session(connection, "default", "unrewarded"))
    assert "Missing: 1 not ended." in said
    with database.write() as connection:
        sessions.end_session(connection, "default", "unrewarded")
    with database.read() as connection:
        said = training_note(connection, sessions.read_session(connection, "default", "unrewarded"))
    assert "Missing: 1 ended without a reward (`unrewarded_seconds`)." in said
    if rule.get("unrewarded_seconds") == 0.0:
        wait_until(lambda: source._supply(NOW).num_ready == 1, "the group is ready")
    else:
        assert source._supply(NOW).num_ready == 0


def test_a_stalled_group_is_dropped_if_the_policy_is_drop(database):
    play_incomplete_group(database)
    source = source_for(database, stalled_policy="drop")

    def is_dropped() -> bool:
        assert source._supply(NOW).num_ready == 0
        return groups_by_status(database) == {"dropped": 1}

    wait_until(is_dropped, "the group is dropped")


@pytest.mark.parametrize("rule", [{"stalled_seconds": None}, {"stalled_seconds": 3600.0}])
def test_the_trainer_waits_for_an_incomplete_group_by_default_and_until_it_is_stalled(database, rule):
    play_incomplete_group(database)
    assert source_for(database, **rule)._supply(NOW).num_ready == 0
    assert groups_by_status(database) == {"open": 1}
    for session_id in ("unfinished", "third"):
        if session_id == "third":
            add_session(database, session_id, group_id="g", group_size=3)
        finish(database, session_id)
    assert source_for(database, **rule)._supply(NOW).num_ready == 1


@pytest.mark.parametrize(
    ("rule", "trained"),
    [({}, [["s-t1"], ["s-t2"]]), ({"train_roles": [Role.SIDE, Role.RETRY]}, [["s-t3"], ["s-t4"]])],
    ids=["main and sub-agents by default", "other roles"],
)
def test_the_batch_holds_the_chains_of_the_trained_roles(database, rule, trained):
    """A session with a chain of each role; the session's reward reaches each of them."""
    add_session(database, group_id="g", group_size=1, turns=0)
    with database.write() as connection:
        for number, role in enumerate((Role.MAIN, Role.SUB_AGENT, Role.SIDE, Role.RETRY), start=1):
            turn = make_turn(f"t{number}", role=role, seq=number - 1)
            name = f"s-t{number}"
            append_turns(connection, [dataclasses.replace(turn, turn_id=name, chain_id=name)])
    finish(database)
    batch = source_for(database, **rule).next(NOW)
    assert sorted(list(experience.turn_ids) for experience in batch.experiences) == trained
    assert {tuple(experience.turn_rewards) for experience in batch.experiences} == {(1.0,)}


def test_groups_of_two_tenants_with_equal_names_are_centred_separately(database):
    """Acme's rewards 1 and 0 have mean 0.5, zeta's 5 and 3 mean 4, although their groups and sessions share names."""
    for tenant, rewards in (("acme", (1, 0)), ("zeta", (5, 3))):
        for run, reward in enumerate(rewards):
            add_finished(database, f"kim-{run}", tenant=tenant, group_id="kim", group_size=2, value=reward)
    batch = source_for(database, groups_per_batch=2).next(NOW)
    keys = [group.key for group in batch.claim.groups]
    chosen = select(batch.experiences, keys, algorithm("dr_grpo"), SelectionRule())
    advantages = {
        experience.session_key: float(turns[0])
        for experience, turns in zip(chosen.experiences, chosen.advantages, strict=True)
    }
    assert advantages == {
        ("acme", "kim-0"): 0.5,
        ("acme", "kim-1"): -0.5,
        ("zeta", "kim-0"): 1.0,
        ("zeta", "kim-1"): -1.0,
    }
    built = build(chosen.experiences, chosen.advantages, policy_version=0)
    assert len(set(built.table.session)) == 4  # the loss has four sessions, not two


def test_a_trained_batch_outlasts_an_outage_of_the_database(ledger, tmp_path, caplog):
    """Here another connection holds SQLite's write lock for longer than a write waits for it."""
    add_finished(ledger, "s")
    impatient = Database(f"sqlite:///{tmp_path}/ledger.db", lock_timeout_seconds=0.05)
    source = source_for(impatient)
    batch = source.next(NOW)
    update = update_record(1)
    acking = threading.Thread(target=source.ack, args=([claims.Finished(batch.claim, update)],))
    with ledger.write():
        acking.start()
        wait_until(lambda: "the database is not available, trying again" in caplog.text, "the trainer has tried")
    acking.join(timeout=WAIT_SECONDS)
    assert groups_by_status(ledger) == {"trained": 1}
    source.close()


def test_an_operation_that_a_repetition_cannot_help_is_not_repeated(ledger):
    """Here the connection is read-only, as with a file that the trainer may not write."""
    process, num_calls = TrainerProcess(), 0

    def write() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            process.stop()
        with ledger.write() as connection:
            connection.exec_driver_sql("PRAGMA query_only = 1")
            versions.publish_version(connection, PolicyVersion(version=1, path="v1"))

    with pytest.raises(StoreUnavailable, match="readonly"):
        outlast(write, process)
    assert num_calls == 1


def test_the_reason_of_the_trainers_wait_is_stored(database):
    """One group of four is ready: the report has this number and the time at which the batch starts in any case."""
    add_finished(database, "s")
    source = source_for(database, groups_per_batch=4, wait_seconds=7200.0)
    waiting = threading.Thread(target=source.next, args=(NOW,))
    waiting.start()
    try:
        wait_until(lambda: statuses(database), "the trainer has reported")
        (reported,) = statuses(database)
        assert reported.text == "waiting: 1 of 4 groups are ready"
        assert 3600 < (reported.starts_at - reported.reported_at).total_seconds() <= 7200
    finally:
        source.stop()
        waiting.join(timeout=WAIT_SECONDS)


def test_a_refilled_batch_is_reported_as_trained_again(database):
    """Its training can take minutes; until then the page and `turnwise doctor` show this report."""
    for session_id in ("a", "b"):
        add_finished(database, session_id)
    source = source_for(database, groups_per_batch=1)
    batch = source.next(NOW)
    assert statuses(database)[0].text == "training on 1 single sessions"
    until = time.monotonic() + WAIT_SECONDS
    batch = source.refill(batch, 1, NOW, until)
    assert statuses(database)[0].text == "training on 2 single sessions"
    assert source.refill(batch, 1, NOW, time.monotonic() + 0.01) is None
    assert statuses(database)[0].text == "training on 2 single sessions"
    source.close()


def test_sessions_that_only_have_to_end_are_in_the_reason_of_the_wait(database):
    for session_id, fields in (("a", {}), ("b", {}), ("c", {"split": Split.EVAL})):
        add_session(database, session_id, **fields)
        with database.write() as conn:
            add_rewards(conn, [Reward(session_id=session_id, value=1)])
    add_session(database, "without a reward")
    source = source_for(database)
    assert source.next(NOW, seconds=0) is None
    assert "; 2 open sessions have a reward: a session counts once it is over" in statuses(database)[0].text
    source.close()


def test_three_versions_that_engines_refused_in_a_row_block_the_training_until_one_is_loaded_again(database):
    """The trainer would go back and make the same version again, for ever."""
    with database.write() as connection:
        for version in range(4):
            versions.publish_version(connection, PolicyVersion(version=version, path=f"/v{version}"))
        serving.activate_version(connection, 0)
        for version in (1, 2):
            serving.fail_version(connection, version, "the engine differs")
        serving.fail_version(connection, 3, "rolled back as a canary: worse")
        assert rewinds.refused_in_a_row(connection, 3) == []
        serving.fail_version(connection, 3, "the engine differs")
    add_finished(database, "s")
    source = source_for(database, groups_per_batch=1)
    found: list[object] = []
    waiting = threading.Thread(target=lambda: found.append(source.next(NOW)))
    waiting.start()
    try:
        wait_until(lambda: statuses(database), "the trainer has reported")
        (reported,) = statuses(database)
        assert (reported.state.value, found) == ("blocked", [])
        assert "turnwise policies activate 3" in reported.text
        with database.write() as connection:
            serving.reconsider_version(connection, 3)
        wait_until(lambda: found, "the batch is claimed")
        assert statuses(database)[0].state.value == "running"
    finally:
        source.stop()
        waiting.join(timeout=WAIT_SECONDS)
        source.close()


def statuses(database: Database) -> list[TrainerStatus]:
    with database.read() as connection:
        return overview.count_rows(connection).trainers


def play_rewarded(ledger, model, name, rewards):
    Rollouts(ledger, load_model(model), num_turns=1).play(name, num_groups=1, group_size=len(rewards))
    lines = [Reward(session_id=f"{name}-0-{run}", value=value) for run, value in enumerate(rewards)]
    with ledger.write() as conn:
        add_rewards(conn, lines)


@pytest.mark.parametrize(
    ("refill_seconds", "second", "expected"),
    [(None, [0, 1], (3, 2, 0)), (None, [0, 0], (4, 3, 1)), (0.0, [0, 1], (5, 2, 2))],
)
def test_groups_of_equal_rewards_are_refilled_from_those_that_are_ready(
    tmp_path, model, ledger, refill_seconds, second, expected
):
    """Two or three of the first three groups have equal rewards: all are replaced, or until one of four is not such."""
    for name, rewards in (("a", [1, 1]), ("b", second), ("c", [0, 0]), *((name, [0, 1]) for name in "defg")):
        play_rewarded(ledger, model, name, rewards)
    settings = settings_for(tmp_path, model, refill_seconds=refill_seconds, total_batches=1)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    metrics, _ = workflow.step(workflow.setup(0))
    workflow.close()
    assert (metrics["num_groups"], metrics["num_uniform_groups"], metrics["num_refill_groups"]) == expected
    assert groups_by_status(ledger)["ready"] == 7 - expected[0]
    assert metrics["num_sessions"] == 2 * (expected[0] - expected[1])
