"""Records of training: what names its updates, what an update names, reports of trainers, and expected advantages."""

import datetime
import json

import pytest
from support.algorithms import assigned
from support.ledger_samples import add_finished, add_session, update_record

from trainer.batch.chain import chain_of
from turnwise.errors import Conflict
from turnwise.exchange.session_document import session_document
from turnwise.features import policies, rewinds
from turnwise.features.advantages import with_advantages
from turnwise.features.exports import experience_json
from turnwise.features.page import overview
from turnwise.features.page.updates import TrainedSession, UpdateGroup, list_update_views
from turnwise.features.records import session_records
from turnwise.store import claims, experiences, rewards, serving, sessions, turns, versions
from turnwise.store.database import Connection, Database
from turnwise.store.experiences import PER_CHAIN
from turnwise.store.selection import SessionFilter
from turnwise.store.trainer_reports import SILENT_SECONDS, TrainerState, TrainerStatus, report_status, trainer_statuses
from turnwise.store.updates import last_updates
from turnwise.types import Credit, GroupStatus, PolicyKind, PolicyVersion, Reward, TrainedIn

KIM = {("acme", "kim-0"): {"acme-kim-0-t1": 0.5}, ("acme", "kim-1"): {"acme-kim-1-t1": -0.5}}


def train(database: Database, update_id: int, advantages, refused=None) -> None:
    claimed = claims.claim(database, "t", max_groups=9, lease_seconds=60)
    record = update_record(update_id, num_sessions=2, num_tokens=4)
    with database.write() as connection:
        assert claims.ack(connection, claims.Finished(claimed, record, refused=refused or {}, trained=advantages))


@pytest.fixture
def ledger_of_two(database: Database) -> Database:
    """Two groups named kim: acme's is trained in update 1, zeta's is dropped by it."""
    for tenant in ("acme", "zeta"):
        for run in range(2):
            add_finished(database, f"kim-{run}", tenant=tenant, group_id="kim", group_size=2, value=1 - run)
    train(database, 1, KIM, {("zeta", "kim"): "uniform_rewards"})
    return database


def test_each_trained_thing_names_its_update_and_version(ledger_of_two):
    expected = (TrainedIn(update_id=1, policy_version=1),)
    with ledger_of_two.read() as connection:
        assert sessions.read_session(connection, "acme", "kim-0").trained_in == expected
        assert sessions.read_session(connection, "zeta", "kim-0").trained_in == ()
        turn = turns.read_turn(connection, "acme", "acme-kim-1-t1")
        assert [(one.update_id, one.policy_version, one.advantage) for one in turn.trained_in] == [(1, 1, -0.5)]
        assert turns.read_turns(connection, "zeta", "kim-0")[0][0].trained_in == ()
        found = experiences.experiences(connection, SessionFilter(tenant="acme"))
        assert [one.trained_in for one in found] == [expected, expected]
        document = session_document(next(session_records(connection, SessionFilter(session_id="kim-0"))))
        assert document["trained_in"] == [{"update_id": 1, "policy_version": 1}]
        assert document["turns"][0]["trained_in"] == [{"update_id": 1, "policy_version": 1, "advantage": 0.5}]


def test_an_update_lists_the_groups_and_sessions_of_the_tenant_that_asks(ledger_of_two):
    with ledger_of_two.read() as connection:
        (acme,), has_more = list_update_views(connection, "acme")
        (zeta,), _ = list_update_views(connection, "zeta")
    assert (acme.update.update_id, has_more) == (1, False)
    assert acme.groups == (UpdateGroup(group_id="kim", status=GroupStatus.TRAINED, reason=None),)
    assert acme.sessions[1] == TrainedSession(session_id="kim-1", group_id="kim", advantages={"acme-kim-1-t1": -0.5})
    assert zeta.groups == (UpdateGroup(group_id="kim", status=GroupStatus.DROPPED, reason="uniform_rewards"),)
    assert zeta.sessions == ()


@pytest.mark.parametrize("retrain", [False, True])
def test_a_late_reward_is_trained_again_only_with_retrain_revised(ledger_of_two, *, retrain):
    with ledger_of_two.write() as connection:
        assert last_updates(connection, "acme", ["kim-0", "kim-1"]) == {"kim-0": 1, "kim-1": 1}
        line = Reward(session_id="kim-0", tenant="acme", value=5.0)
        rewards.add_rewards(connection, [line], retrain=retrain)
        assert overview.count_rows(connection, "acme").groups == {"ready" if retrain else "trained": 1}
    if retrain:
        train(ledger_of_two, 2, KIM)
        with ledger_of_two.read() as connection:
            updates = sessions.read_session(connection, "acme", "kim-0").trained_in
            assert [one.update_id for one in updates] == [1, 2]


def test_a_version_without_a_pin_is_served_until_a_newer_one_is_published(database, tmp_path):
    with database.write() as connection:
        for version in range(3):
            versions.publish_version(connection, PolicyVersion(version=version, path=str(tmp_path)))
        rewinds.choose_version(connection, 0, pin=False)
        assert serving.serving_state(connection).pinned_version == 0
        versions.publish_version(connection, PolicyVersion(version=3, path=str(tmp_path)))
        assert serving.serving_state(connection).pinned_version is None
        assert rewinds.undone(serving.serving_state(connection)) == range(1, 3), "also after a newer one was published"
        rewinds.choose_version(connection, 1, pin=True)
        assert not rewinds.undone(serving.serving_state(connection))
        versions.publish_version(connection, PolicyVersion(version=4, path=str(tmp_path)))
        assert serving.serving_state(connection).pinned_version == 1
        rewinds.choose_version(connection, 4, pin=False)  # the newest: follow it
        assert serving.serving_state(connection).pinned_version is None


def test_a_version_whose_files_are_gone_cannot_be_chosen(database, tmp_path):
    with database.write() as connection:
        versions.publish_version(connection, PolicyVersion(version=0, path="org/model"))
        for version, path in ((1, tmp_path / "gone"), (2, tmp_path)):
            versions.publish_version(connection, PolicyVersion(version=version, path=str(path), kind=PolicyKind.LORA))
        other, _ = policies.create_policy(connection, "acme", "other")
        fields = {"path": str(tmp_path), "kind": PolicyKind.LORA, "policy_id": other.policy_id}
        versions.publish_version(connection, PolicyVersion(version=3, **fields))
        newest, _ = versions.list_versions(connection, policy_ids=[0])
    for policy in newest:
        if policy.version == 1:
            with pytest.raises(Conflict, match=r"Version 1's files no longer exist .* Choose one of: 0, 2\."):
                rewinds.check_files_exist(database, policy)
        else:
            rewinds.check_files_exist(database, policy)


def test_an_update_is_recorded_although_an_imported_session_in_it_was_deleted_meanwhile(database):
    add_finished(database, "kim-0", tenant="acme", group_id="kim", group_size=1, value=1)
    train(database, 1, {("acme", "kim-0"): {"acme-kim-0-t1": 0.5}, ("acme", "gone"): {"acme-gone-t1": 1.0}})
    with database.read() as connection:
        (update,), _ = list_update_views(connection, "acme")
    assert [session.session_id for session in update.sessions] == ["kim-0"]


NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def status(trainer_id: str, text: str, minute: int, state: TrainerState = TrainerState.RUNNING) -> TrainerStatus:
    at = NOON + datetime.timedelta(minutes=minute)
    return TrainerStatus(trainer_id=trainer_id, text=text, state=state, starts_at=at, reported_at=at)


def report(connection: Connection, said: TrainerStatus) -> None:
    report_status(connection, said.trainer_id, said.text, said.state, seconds_left=0, now=said.reported_at)


def test_the_last_report_of_each_trainer_is_returned_newest_first(database):
    with database.write() as connection:
        for each in (status("a", "1 of 4", 0), status("b", "2 of 4", 1), status("a", "3 of 4", 2)):
            report(connection, each)
        found = trainer_statuses(connection, now=NOON + datetime.timedelta(minutes=2))
    assert found == [status("a", "3 of 4", 2), status("b", "2 of 4", 1)]


def test_only_a_trainer_that_said_nothing_at_its_end_is_silent_after_a_minute(database):
    with database.write() as connection:
        for name, state in (("killed", "running"), ("ended", "stopped"), ("failed", "died")):
            report(connection, status(name, name, 0, TrainerState(state)))
        found = trainer_statuses(connection, now=NOON + datetime.timedelta(seconds=SILENT_SECONDS + 1))
    assert {each.trainer_id: each.state.value for each in found} == {
        "killed": "silent",
        "ended": "stopped",
        "failed": "died",
    }


def reward_steps(database: Database, session_id: str, *values: float, is_over: bool = True) -> None:
    with database.write() as connection:
        lines = [Reward(session_id=session_id, step=step, value=value) for step, value in enumerate(values)]
        rewards.add_rewards(connection, lines)
        if is_over:
            sessions.end_session(connection, "default", session_id)


@pytest.mark.parametrize("credit", Credit)
def test_the_expected_advantage_is_that_of_grpo_and_a_turn_shows_its_own_reward(database, credit):
    """Three of four sessions of a group are over; the open one is shown by its name, without an advantage."""
    for name in ("a", "b", "c", "open"):
        add_session(database, name, turns=2, group_id="g", group_size=4, credit=credit)
    for name, values in (("a", (0.0, 1.0)), ("b", (2.0, 1.0)), ("c", (1.0, 4.0))):
        reward_steps(database, name, *values)
    reward_steps(database, "open", 1.0, 1.0, is_over=False)
    with database.read() as connection:
        shown = list(with_advantages(connection, SessionFilter(group_id="g"), PER_CHAIN))
        trained = list(experiences.experiences(connection, SessionFilter(group_id="g"), PER_CHAIN))
        lines = [experience_json(one) for one in with_advantages(connection, SessionFilter(session_id="b"))]
        (waiting,) = with_advantages(connection, SessionFilter(session_id="open"), PER_CHAIN)
    expected = [turns.tolist() for turns in assigned([chain_of(each) for each in trained], "grpo")]
    assert [experience_json(one)["advantage"] for one in shown] == expected
    assert [line["advantage"] for line in lines] == [[value] for value in expected[1]]
    own = [2.0, 1.0] if credit is Credit.STEP_WISE else [3.0, 3.0]
    assert [(line["reward"], line["return"], line["session_reward"]) for line in lines] == [
        (value, [value], 3.0) for value in own
    ]
    assert json.dumps(lines[0]).index('"reward"') < json.dumps(lines[0]).index('"session_reward"')
    assert (experience_json(waiting)["status"], experience_json(waiting)["advantage"]) == ("open", None)
