"""The bounds that make the trainer wait; no group is dropped without a log line during a wait."""

import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.ledger_samples import add_finished, add_session, finish, groups_by_status, update_record
from support.waiting import WAIT_SECONDS, wait_until

from trainer.claims import claims as pacing
from trainer.claims.claims import Claims, Supply, Wait, describe_wait
from trainer.claims.ledger import RunProgress
from trainer.features import FEATURES, Settings, rewinds
from trainer.features.pace import why_too_far_ahead
from trainer.features.policies import PolicyNames, training_policy
from trainer.features.rewinds import Rewind
from turnwise.features import policies
from turnwise.features import rewinds as choices
from turnwise.features.policies import publish_next
from turnwise.store import claims, rows, schema, serving, versions
from turnwise.store.database import Database
from turnwise.types import PolicyKind, PolicyVersion

NOW = RunProgress(num_batches=1)
"""A run that is not at its first batch, which waits shorter."""
AT_7 = RunProgress(num_batches=1, recent_versions=tuple(range(8)))


@pytest.mark.parametrize(
    ("oldest", "bound", "is_held"),
    [
        # The next version is 8. It is 4 ahead of 4 and 5 ahead of 3.
        (4, 4, False),
        (3, 4, True),
        (None, 4, False),
        (0, None, False),
    ],
)
def test_the_next_version_is_at_most_so_many_ahead_of_the_oldest_open_group(oldest, bound, is_held):
    reason = why_too_far_ahead(oldest, AT_7, Settings(max_versions_in_flight=bound))
    assert (reason is not None) == is_held
    assert not is_held or reason.endswith("training waits for them (max_versions_in_flight=4)")


def test_a_strict_staleness_bound_tightens_the_pace():
    """With max_staleness 1 a group of version 6 may be trained at version 7, one of version 5 may not."""
    rule = Settings(max_staleness=1)
    assert why_too_far_ahead(6, AT_7, rule) is None
    assert why_too_far_ahead(5, AT_7, rule) is not None


def test_a_pinned_version_far_behind_makes_the_trainer_wait_or_go_back_once():
    supply = rewinds.GivenUp(pinned=0)
    assert rewinds.why_held(supply, AT_7, Settings()).startswith("version 0 is pinned and the trainer is at version 7")
    back = Settings(when_pinned="train_pinned")
    assert rewinds.why_held(supply, AT_7, back) == Rewind(version=0, reason="version 0 is pinned")
    rewound = RunProgress(num_batches=1, recent_versions=(0, 8, 9, 10, 11), rewound_to=0)
    assert isinstance(rewinds.why_held(supply, rewound, back), str)


def test_weights_that_come_from_an_undone_version_are_left_for_the_version_before_it():
    """Also those of version 8, which was trained while 4 to 7 were undone; without a state to go back to it waits."""
    supply = rewinds.GivenUp(undone=range(4, 8), failed=frozenset({8}))
    at = RunProgress(num_batches=1, recent_versions=tuple(range(9)))
    back = Rewind(version=3, reason="version 3 was activated in place of version 7")
    assert rewinds.why_held(supply, at, Settings()) == back
    tried = RunProgress(num_batches=1, recent_versions=at.recent_versions, rewound_to=3)
    assert rewinds.why_held(supply, tried, Settings()).startswith(f"{back.reason}, and it cannot be trained from")
    assert (
        rewinds.why_held(
            rewinds.GivenUp(undone=supply.undone),
            RunProgress(num_batches=1, recent_versions=(2, 3, 9)),
            Settings(),
        )
        is None
    )


def test_a_version_that_was_in_training_when_its_parent_was_undone_is_not_served(database):
    source = source_for(database)
    for version, parents in ((0, ()), (1, (0,)), (2, (0, 1))):
        source.publish(PolicyVersion(version=version, path=f"v{version}"), parents)
    with database.write() as connection:
        choices.choose_version(connection, 0, pin=False)
    source.publish(PolicyVersion(version=3, path="v3"), (0, 1, 2))
    with database.read() as connection:
        assert (versions.get_version(connection, 3).error, serving.serving_state(connection).pinned_version) == (
            choices.UNDONE,
            0,
        )
    source.publish(PolicyVersion(version=4, path="v4"), (0,))
    with database.read() as connection:
        assert (versions.get_version(connection, 4).error, serving.serving_state(connection).pinned_version) == (
            None,
            None,
        )
    source.close()


@pytest.mark.parametrize(("bound", "is_held"), [(1, True), (2, False)])
def test_versions_are_counted_along_the_ancestry_of_the_weights(bound, is_held):
    """After going back from 7 to 3, version 8 is one version ahead of 3, and the next one two."""
    at = RunProgress(num_batches=1, recent_versions=(2, 3, 8))
    assert (why_too_far_ahead(3, at, Settings(max_versions_in_flight=bound)) is not None) == is_held


RULE = Settings(groups_per_batch=32, singles_per_group=8)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((Supply(num_ready=8), RULE, 41.4, None), "waiting: 8 of 32 groups are ready, starts in 41 s"),
        ((Supply(num_ready=7), RULE, None, None), "waiting: 7 of 32 groups are ready; a batch needs at least 8"),
        ((Supply(num_ready=4), RULE, 1.0, "why"), "4 of 32 groups are ready; why"),
        (
            (Supply(num_ready=4, num_singles=37), RULE, 1.0, None),
            "waiting: 4 of 32 groups are ready, and 37 single sessions, of which 8 count as a group, starts in 1 s",
        ),
        ((Supply(num_ready=0, num_singles=47), RULE, None, None), "waiting: 47 of 64 single sessions are ready"),
        (
            (Supply(num_ready=0, num_singles=70), RULE, 9.0, None),
            "waiting: 70 of 256 single sessions are ready, starts in 9 s",
        ),
        (
            (Supply(num_ready=0, num_open=100), RULE, None, None),
            (
                "waiting: 0 of 32 groups are ready; a batch needs at least 8, or 64 single sessions; 100 open sessions "
                "have a reward: a session counts once it is over (POST /v1/sessions/{session_id}/end; one that no call "
                "names is over after ten minutes without a call)"
            ),
        ),
    ],
)
def test_the_reason_of_a_wait_is_described_in_one_line(arguments, line):
    assert describe_wait(*arguments) == line


def test_the_number_of_open_sessions_is_reported_and_not_logged_again(caplog, monkeypatch):
    """Each reward of live traffic changes it."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(pacing, "REPORT_SECONDS", 0.0)
    reports: list[str] = []
    wait = Wait(RULE, lambda text, _: reports.append(text))
    for num_open in (1, 2, 2, 3, 0):
        assert not wait.is_over(Supply(num_ready=0, num_open=num_open), None)
    counted = [text.partition("64 single sessions")[2][:20] for text in reports]
    assert counted == ["; 1 open session has", "; 2 open sessions ha", "; 3 open sessions ha", ""]
    assert len(caplog.messages) == 2


def source_for(database: Database, **changes) -> Claims:
    values = {"groups_per_batch": 2, "singles_per_group": 1, "wait_seconds": 0.0}
    return Claims(database, Settings(**(values | changes)), holds=FEATURES.holds)


def next_batch_within(source, at, seconds=0.5):
    timer = threading.Timer(seconds, source.stop)
    timer.start()
    try:
        return source.next(at)
    finally:
        timer.cancel()


def pin(database, version):
    with database.write() as connection:
        for number in range(version + 1):
            versions.publish_version(connection, PolicyVersion(version=number, path=f"v{number}"))
        choices.pin_policy(connection, version)


def test_while_an_old_version_is_pinned_no_group_is_claimed_or_dropped(database, caplog):
    """Even under a staleness bound that would drop them: they wait with the trainer."""
    caplog.set_level("INFO")
    add_finished(database, "s", group_id="g", group_size=1)
    pin(database, 0)
    at, source = AT_7, source_for(database, max_staleness=2)
    with ThreadPoolExecutor(1) as trainer:
        batch = trainer.submit(source.next, at)
        waits = "version 0 is pinned and the trainer is at version 7: training waits"
        wait_until(lambda: waits in caplog.text, "the wait is logged")
        source.stop()
        assert batch.result(WAIT_SECONDS) is None
    assert groups_by_status(database) == {"ready": 1}


@pytest.mark.parametrize(
    ("quota", "reason"),
    [
        ({"tenant_trained_tokens_per_day": 100}, "have trained 100 tokens today, of 100 a day"),
        ({"tenant_policy_bytes": 5}, "take 5 bytes on disk, of 5"),
    ],
)
def test_a_tenants_quota_holds_the_training_of_its_policies(database, tmp_path, caplog, monkeypatch, quota, reason):
    """What another tenant's policies and the default one have trained does not count.

    One version of each policy is measured here, and the newest of the tenant has no files.
    """
    caplog.set_level("INFO")
    monkeypatch.setattr(policies, "MAX_MEASURED", 1)
    version = tmp_path / "version"
    version.mkdir()
    (version / "adapter").write_text("bytes")
    with database.write() as conn:
        versions.publish_version(conn, PolicyVersion(version=0, path="base"))
        own, other = (policies.create_policy(conn, tenant, "p")[0] for tenant in ("default", "b"))
        publish_next(conn, str(version), PolicyKind.LORA, metrics={}, policy_id=own.policy_id)
        second, _ = policies.create_policy(conn, "default", "q")
        publish_next(conn, str(tmp_path / "gone"), PolicyKind.LORA, metrics={}, policy_id=second.policy_id)
        for update_id, policy_id in enumerate((own.policy_id, other.policy_id, 0), 1):
            record = update_record(update_id, policy_version=0, policy_id=policy_id, num_tokens=100)
            conn.execute(schema.updates.insert().values(**rows.UPDATES.row(record)))
    add_finished(database, "s", group_id="g", group_size=1, policy_id=own.policy_id)
    values = {"groups_per_batch": 1, "singles_per_group": 1, "wait_seconds": 0.0}
    source = Claims(database, Settings(**values, **quota), policy=own, holds=FEATURES.holds)
    with ThreadPoolExecutor(1) as trainer:
        batch = trainer.submit(source.next, NOW)
        try:
            wait_until(lambda: f"the policies of tenant 'default' {reason}" in caplog.text, "the wait is logged")
        finally:
            source.stop()
        assert batch.result(WAIT_SECONDS) is None
    source = Claims(database, Settings(**values, **dict.fromkeys(quota, 101)), policy=own, holds=FEATURES.holds)
    assert source.next(NOW) is not None
    source.close()


def test_the_wait_for_the_first_batch_is_shorter(database, monkeypatch):
    add_finished(database, "s", group_id="g", group_size=1)
    monkeypatch.setattr(pacing, "FIRST_WAIT_SECONDS", 0.0)
    patient = {"wait_seconds": 3600.0}
    assert next_batch_within(source_for(database, **patient), NOW) is None
    assert next_batch_within(source_for(database, **patient), RunProgress(), WAIT_SECONDS) is not None


def test_a_late_batch_fills_a_quarter_of_its_places_and_a_whole_one_does_not_wait(database):
    """Eight places of three single sessions: five wait however long it takes, six are a batch once the wait is over.

    Two of two places do not wait, and the seventh session is not in that batch.
    """
    late, patient = {"groups_per_batch": 8, "singles_per_group": 3}, {"singles_per_group": 3, "wait_seconds": 3600.0}
    for number in range(5):
        add_finished(database, f"s{number}")
    assert next_batch_within(source_for(database, **late), NOW) is None
    for number in (5, 6):
        add_finished(database, f"s{number}")
    assert next_batch_within(source_for(database, **patient, groups_per_batch=8), NOW) is None
    for rule, size in ((late, 7), (patient, 6)):
        source = source_for(database, **rule)
        batch = next_batch_within(source, NOW, WAIT_SECONDS)
        assert [group.group_id for group in batch.claim.groups] == [f"s{number}" for number in range(size)]
        source.close()


def test_single_sessions_that_are_ready_join_a_small_batch_of_groups(database):
    """The batch does not wait for them, and they need not wait for a whole one."""
    for name, group in (("single", {}), ("a", {"group_id": "g", "group_size": 2})):
        add_finished(database, name, **group)
    add_finished(database, "b", group_id="g", group_size=2)
    batch = next_batch_within(source_for(database, groups_per_batch=4, singles_per_group=8), NOW, WAIT_SECONDS)
    assert sorted(group.group_id for group in batch.claim.groups) == ["g", "single"]


def test_dropped_groups_are_named_in_the_log_when_nothing_else_is_ready(database, caplog):
    """The claim is empty then, and the drop must still be logged."""
    add_finished(database, "s", group_id="g", group_size=1)
    assert claims.claim(database, "t", max_groups=1, lease_seconds=1.0, min_policy_version=1) is None
    assert caplog.messages == ["dropped 1 groups with a turn older than policy version 1 (max_staleness): g"]


@pytest.mark.parametrize("bound", [2, None])
def test_a_slow_session_holds_the_trainer_and_is_trained_when_it_ends(database, bound):
    """At version 2 the next version would be 3 ahead of the session's: nothing is claimed before it ended.

    Without a bound the quick group is claimed at once, and the slow one becomes ever more stale.
    """
    for name in ("slow", "quick"):
        add_session(database, name, group_id=name, group_size=1)
    finish(database, "quick")
    at = RunProgress(num_batches=1, recent_versions=(0, 1, 2))
    source = source_for(database, groups_per_batch=1, max_versions_in_flight=bound)
    if bound is None:
        assert [group.group_id for group in source.next(at).claim.groups] == ["quick"]
        source.close()
        return
    threading.Timer(0.3, finish, (database, "slow")).start()
    batch = source_for(database, max_versions_in_flight=bound).next(at)
    assert {group.group_id for group in batch.claim.groups} == {"quick", "slow"}
    assert batch.held_seconds > 0.1


def test_a_log_line_of_a_named_policy_begins_with_its_name(caplog):
    caplog.handler.addFilter(PolicyNames())
    log = logging.getLogger("trainer.test")
    named = training_policy.set("support")
    try:
        log.warning("batch %d: %s", 6, "100 %")
    finally:
        training_policy.reset(named)
    log.warning("batch %d", 7)
    assert caplog.messages == ["policy 'support': batch 6: 100 %", "batch 7"]
