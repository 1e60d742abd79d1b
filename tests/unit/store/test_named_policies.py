"""Named policies: what is one policy's, its versions, pin, arms, groups and claims, is nobody else's."""

import dataclasses
import datetime
from collections.abc import Mapping
from typing import Any

import pytest
import sqlalchemy as sa
from support import store_fill
from support.ledger_samples import add_finished, finish, make_turn, sampled_by, update_record

from proxy.features.page.summaries import summarise_updates
from turnwise.errors import Conflict, InvalidRequest, NotFound
from turnwise.features import (
    advantages,
    arms,
    consent,
    evaluation,
    gate,
    pace,
    policies,
    retention,
    rewinds,
    sentinels,
    stalled,
    transfers,
)
from turnwise.features.consent import ConsentMark, ConsentOf
from turnwise.features.imported import imported_groups
from turnwise.features.page import overview
from turnwise.features.page import updates as page_updates
from turnwise.features.page.updates import list_updates
from turnwise.features.untrained import trained_shares
from turnwise.store import (
    claims,
    experiences,
    groups,
    rewards,
    rows,
    schema,
    serving,
    sessions,
    updates,
    versions,
)
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.store.turns import append_turns
from turnwise.types import (
    DEFAULT_POLICY,
    TRAINED_ROLES,
    Credit,
    PolicyKind,
    PolicyVersion,
    Reward,
    Session,
    Split,
    utc_now,
)


@pytest.fixture
def two(database: Database) -> tuple[int, int]:
    with database.write() as conn:
        versions.publish_version(conn, PolicyVersion(version=0, path="base"))
        created = [policies.create_policy(conn, tenant, "support") for tenant in ("a", "b")]
    (first, second), are_new = zip(*created, strict=True)
    assert all(are_new)
    assert (first.tenant, first.name, second.tenant) == ("a", "support", "b")
    return first.policy_id, second.policy_id


def adapter(version: int, policy_id: int, **fields: Any) -> PolicyVersion:
    return PolicyVersion(version=version, policy_id=policy_id, path=f"/{version}", kind=PolicyKind.LORA, **fields)


def publish(database: Database, *published: PolicyVersion, is_served: bool = True) -> None:
    with database.write() as conn:
        for version in published:
            versions.publish_version(conn, version)
            if is_served:
                serving.activate_version(conn, version.version)


@pytest.mark.parametrize("name", ["", "default", "a/b", "a b", "support@7", "ü", "x" * 101, ".", "-_"])
def test_a_name_that_could_be_mistaken_is_refused(database, name):
    with database.write() as conn, pytest.raises(InvalidRequest, match="cannot be named"):
        policies.create_policy(conn, "a", name)


def test_the_weights_below_adapters_do_not_change(database, two):
    with database.write() as conn:
        with pytest.raises(Conflict, match="below the adapters"):
            versions.publish_version(conn, PolicyVersion(version=1, path="/1"))
        with pytest.raises(Conflict, match="is an adapter"):
            versions.publish_version(conn, PolicyVersion(version=1, path="/1", policy_id=two[0]))
        with pytest.raises(NotFound):
            versions.publish_version(conn, adapter(1, 99))
        assert versions.publish_version(conn, adapter(1, two[0]))
        with pytest.raises(Conflict, match="another policy"):
            versions.publish_version(conn, adapter(1, two[1]))


def test_no_policy_is_created_on_weights_that_were_trained(database):
    with database.write() as conn:
        for version in (0, 1):
            versions.publish_version(conn, PolicyVersion(version=version, path=f"/{version}"))
        with pytest.raises(Conflict, match="replaces all weights"):
            policies.create_policy(conn, "a", "support")
        with pytest.raises(InvalidRequest, match="whole weights"):
            policies.create_policy(conn, "a", "support", "default@1")
        serving.fail_version(conn, 1, "not finite")
        assert policies.create_policy(conn, "a", "support")[1]


def test_what_is_said_of_versions_is_of_those_of_a_policy(database, two):
    a, b = two
    publish(database, adapter(1, a), adapter(2, b), adapter(3, a))
    with database.write() as conn:
        versions.publish_version(conn, adapter(4, b, update_id=2))
        serving.fail_version(conn, 4, "refused")
        assert [each.version for each in rewinds.refused_in_a_row(conn, 1, b)] == [4]
        assert rewinds.refused_in_a_row(conn, 1, a) == []
        assert [each.version for each in versions.list_versions(conn, policy_ids=[a])[0]] == [3, 1]
        versions.publish_version(conn, adapter(6, b, update_id=3))
        assert transfers.fail_unwritten(conn, 0, a) == []
        assert transfers.fail_unwritten(conn, 0, b) == [6]


def test_a_group_has_one_policy(database, two):
    a, b = two
    with database.write() as conn:
        sessions.create_session(conn, Session(session_id="one", tenant="a", group_id="g", policy_id=a))
        with pytest.raises(Conflict, match="of another policy"):
            sessions.create_session(conn, Session(session_id="two", tenant="a", group_id="g", policy_id=b))
        (refused,) = sessions.create_sessions(conn, [Session(session_id="three", tenant="a", group_id="g")])
        assert isinstance(refused, Conflict)


def add_shared(database: Database, session_id: str, sampled: Mapping[int | None, int], **fields: Any) -> None:
    """Store a session with a turn `SESSION-POLICY` of each policy, by its version; None is the session's own."""
    with database.write() as conn:
        sessions.create_session(conn, Session(session_id=session_id, **fields))
        for number, (policy_id, version) in enumerate(sampled.items(), 1):
            turn_id = f"{session_id}-{'own' if policy_id is None else policy_id}"
            own = fields.get("policy_id", DEFAULT_POLICY)
            chain = {"turn_id": turn_id, "chain_id": turn_id, "policy_id": own if policy_id is None else policy_id}
            turn = make_turn(f"t{number}", session_id=session_id, tools=None)
            append_turns(conn, [dataclasses.replace(turn, **chain | sampled_by(version))])


def trained_turns(database: Database, held: claims.Claim, policy_id: int) -> list[tuple[str, ...]]:
    with database.read() as conn:
        found = experiences.experiences_of_groups(
            conn, held.group_pks, experiences.Shape(merge="chain", policy_id=policy_id)
        )
        return [one.turn_ids for one in found if one.policy_id == policy_id]


def claimed_by(database: Database, policy_id: int, **options: Any) -> claims.Claim | None:
    return claims.claim(database, f"t{policy_id}", max_groups=9, lease_seconds=60, policy_id=policy_id, **options)


def acknowledge(database: Database, held: claims.Claim, policy_id: int, update_id: int) -> None:
    record = update_record(update_id, policy_id=policy_id, policy_version=10 + update_id, trainer_id=f"t{policy_id}")
    with database.write() as conn:
        assert claims.ack(conn, claims.Finished(held, record, adapter(10 + update_id, policy_id, update_id=update_id)))


def test_each_policy_of_a_group_trains_its_turns_once_whoever_comes_first(database, two):
    """B sampled in two of three sessions of A. Its part is ready with the group, and no claim of one is the other's."""
    a, b = two
    publish(database, adapter(1, a), adapter(2, b))
    of_group = {"group_id": "g", "group_size": 3, "policy_id": a}
    for number, sampled in enumerate(({None: 1, b: 2}, {b: 2, None: 1}, {None: 1})):
        add_shared(database, f"s{number}", sampled, **of_group)
        assert (claimed_by(database, a), claimed_by(database, b)) == (None, None)
        finish(database, f"s{number}")
    of_b = claimed_by(database, b)
    assert of_b is not None
    assert trained_turns(database, of_b, b) == [(f"s0-{b}",), (f"s1-{b}",)]
    acknowledge(database, of_b, b, 1)
    assert claimed_by(database, b) is None
    of_a = claimed_by(database, a)
    assert of_a is not None
    assert trained_turns(database, of_a, a) == [("s0-own",), ("s1-own",), ("s2-own",)]
    assert claims.take_back(database, f"t{b}", b) == 0
    acknowledge(database, of_a, a, 2)
    assert (claimed_by(database, a), claimed_by(database, b), claimed_by(database, DEFAULT_POLICY)) == (
        None,
        None,
        None,
    )
    with database.write() as conn:
        of_policies = [each for each in trained_shares(conn) if each.by == "policy"]
        assert [(each.name, each.num_sampled) for each in of_policies] == [("support", 10)]  # five turns of both
        of_trainers = [updates.updates_after(conn, 0, each) for each in two]
        assert [[each.update_id for each in found] for found in of_trainers] == [[2], [1]]
        assert [[updates.last_update(conn, policy_id=each)] for each in two] == of_trainers
        rewards.add_rewards(conn, [Reward(session_id="s1", value=0.0)], retrain=True)
        assert [claims.num_claimable(conn, policy_id=each)[0] for each in two] == [1, 1]
        in_updates = page_updates.groups_of(conn, "default", [1, 2])
        assert {number: [one.group_id for one in found] for number, found in in_updates.items()} == {1: ["g"], 2: ["g"]}
    with database.write() as conn:
        retention.delete_sessions(conn, SessionFilter(tenant="default"))
        assert conn.execute(sa.select(schema.groups)).all() == []


def test_a_part_without_a_session_that_may_be_trained_is_dropped_or_never_made(database, two):
    """B sampled in one of two sessions of each group of A, which is denied before the group is ready, or after.

    The default policy sampled in the other one and has a group of its own.
    """
    a, b = two
    publish(database, adapter(1, a), adapter(2, b))
    add_shared(database, "own", {None: 1}, group_id="own", group_size=1)
    finish(database, "own")
    denied = ConsentMark(kind=ConsentOf.USER, name="kim")
    for group_id in ("before", "after"):
        of_group = {"group_id": group_id, "group_size": 2, "policy_id": a}
        add_shared(database, f"{group_id}-1", {None: 1, b: 2}, user_id="kim", **of_group)
        add_shared(database, f"{group_id}-2", {None: 1, DEFAULT_POLICY: 1}, **of_group)
    finish(database, "after-1")
    finish(database, "after-2")
    with database.write() as conn:
        consent.restrict_marked(conn, denied)
    finish(database, "before-1")
    finish(database, "before-2")
    with database.read() as conn:
        assert [claims.num_claimable(conn, policy_id=each)[0] for each in two] == [2, 0]
        is_part = sa.and_(schema.groups.c.part_of.is_not(None), schema.groups.c.policy_id == b)
        parts = sa.select(schema.groups.c.group_id, schema.groups.c.reason).where(is_part)
        assert [tuple(row) for row in conn.execute(parts)] == [("after", "no_consent")]


def test_a_part_is_stale_and_in_flight_by_its_own_versions(database, two):
    """Version 9 of B is newer than 1 of A, which is dropped alone; a session of split `eval` is trained by none."""
    a, b = two
    publish(database, adapter(1, a), adapter(2, b), adapter(9, b))
    for session_id, fields in (("s", {}), ("held out", {"split": Split.EVAL})):
        add_shared(database, session_id, {None: 1, b: 9}, policy_id=a, **fields)
    with database.read() as conn:
        since = utc_now() - datetime.timedelta(hours=1)
        assert [pace.oldest_version_in_flight(conn, since, each) for each in two] == [1, 9]
        for each in (a, b):
            assert groups.num_open_with_reward(conn, each) == 0
    with database.write() as conn:
        for session_id in ("s", "held out"):
            rewards.add_rewards(conn, [Reward(session_id=session_id, value=1.0)])
        assert [groups.num_open_with_reward(conn, each) for each in (*two, DEFAULT_POLICY)] == [1, 1, 0]
        for session_id in ("s", "held out"):
            sessions.end_session(conn, "default", session_id)
    assert claimed_by(database, a, min_policy_version=3) is None
    of_b = claimed_by(database, b, min_policy_version=3)
    assert [(each.group_id, each.is_single) for each in of_b.groups] == [("s", True)]
    with database.read() as conn:
        (waiting,) = conn.execute(sa.select(schema.groups.c.status).where(schema.groups.c.part_of.is_(None)))
        assert waiting.status == "dropped"
        assert evaluation.versions_sampled(conn, [("default", "held out")]) == (1, 1)
        assert [one.version for one in sentinels.live_sessions(conn, 9, a)] == [1]
        newer, older = arms.arms_since(conn, since, (1, 9), a)
        assert (newer.num_sessions, older.num_sessions) == (2, 0)
        (of_gate,) = gate.regression_set(conn, 9, [], roles=TRAINED_ROLES, policy_id=a)[0]
        assert of_gate.turn_ids == ("held out-own",)
    with database.write() as conn:
        pruned = retention.prune(conn, utc_now() + datetime.timedelta(hours=1))
    assert pruned.sessions == (("default", "held out"),), "that of a claimed part stays"


def test_a_stalled_group_of_two_policies_is_ready_for_both(database, two):
    a, b = two
    publish(database, adapter(1, a), adapter(2, b))
    add_shared(database, "s", {None: 1, b: 2}, policy_id=a, group_id="g", group_size=2)
    finish(database, "s")
    with database.write() as conn:
        assert stalled.stalled(utc_now() + datetime.timedelta(hours=1)).make(conn) == ["g"]
    assert [[group.group_id for group in claimed_by(database, each).groups] for each in two] == [["g"], ["g"]]


def test_each_policy_has_the_sessions_reward_for_its_own_turns(database, two):
    """Steps 0 of A and 1 of B with rewards 1 and 2, and 4 for the session, which goes to the last step of each.

    With discount 0.5 A's return is 1 + 4 + 0.5·2 = 6, because B's step follows; B's is 2 + 4.
    """
    a, b = two
    publish(database, adapter(1, a), adapter(2, b))
    add_shared(database, "s", {None: 1, b: 2}, policy_id=a, credit=Credit.STEP_WISE, gamma=0.5)
    lines = [Reward(session_id="s", step=0, value=1.0), Reward(session_id="s", step=1, value=2.0)]
    with database.write() as conn:
        rewards.add_rewards(conn, [*lines, Reward(session_id="s", value=4.0)])
        sessions.end_session(conn, "default", "s")
    with database.read() as conn:
        found = list(advantages.with_advantages(conn, SessionFilter(session_id="s")))
    assert [(one.policy_id, one.turn_ids, one.turn_returns.tolist(), one.reward) for one in found] == [
        (a, ("s-own",), [6.0], 7.0),
        (b, (f"s-{b}",), [6.0], 7.0),
    ]


def test_a_tenant_reads_the_updates_of_its_policies_and_of_the_default_one(database, two):
    publish(database, *(adapter(number, policy_id) for number, policy_id in enumerate(two, 1)))
    with database.write() as conn:
        for update_id, policy_id in enumerate((DEFAULT_POLICY, *two)):
            update = update_record(update_id, policy_id=policy_id, num_groups=0, num_sessions=0, num_tokens=0)
            conn.execute(sa.insert(schema.updates).values(**rows.UPDATES.row(update)))
    with database.read() as conn:
        for tenant, shown in (("a", [1, 0]), ("b", [2, 0]), ("c", [0])):
            assert [each.update_id for each in list_updates(conn, tenant=tenant)[0]] == shown
            assert [each.update.update_id for each in page_updates.list_update_views(conn, tenant)[0]] == shown
            assert [each.update_id for each in summarise_updates(conn, tenant)] == shown[::-1]
            state = overview.read_state(conn, tenant)
            assert [number for kind, number in state if kind == "policy"] == shown[::-1]
            assert [number for kind, number in state if kind == "update"] == shown[:1]


def test_sessions_are_compared_within_their_policy(database, two):
    a, b = two
    publish(database, adapter(1, a), adapter(2, b))
    since = utc_now()
    add_finished(database, "of-a", policy_id=a, of_turns=sampled_by(1))
    add_finished(database, "of-b", policy_id=b, of_turns=sampled_by(2))
    add_finished(database, "held-out-of-b", policy_id=b, split=Split.EVAL, of_turns=sampled_by(2))
    with database.read() as conn:
        newer, older = arms.arms_since(conn, since, (1, 2), a)
        assert (newer.num_sessions, older.num_sessions) == (1, 0)
        assert [one.session_id for one in sentinels.live_sessions(conn, 9, a, newest=True)] == ["of-a"]
        assert [one.session_id for one in sentinels.live_sessions(conn, 9, b)] == ["of-b"]
        named = {policy_id: gate.regression_set(conn, 9, [], roles=[], policy_id=policy_id)[1] for policy_id in two}
        assert [list(named[policy_id]) for policy_id in two] == [[], [("default", "held-out-of-b")]]
        assert imported_groups(conn, a) == []


def test_the_deletion_of_a_tenant_removes_its_policies_and_their_files(database, two, tmp_path):
    """Their numbers stay taken, because engines know adapters by them; the report names directories that are left."""
    trained = tmp_path / str(two[0]) / "v000001"
    trained.mkdir(parents=True)
    (tmp_path / str(two[0]) / "v000001.trainer").mkdir()
    by_hand = tmp_path / "by-hand"
    by_hand.mkdir()
    of_a = PolicyVersion(version=1, policy_id=two[0], path=str(trained), kind=PolicyKind.LORA, update_id=1)
    publish(
        database,
        of_a,
        dataclasses.replace(of_a, version=2, path=str(by_hand), update_id=None),
        adapter(3, two[1]),
    )
    with database.write() as conn:
        rewinds.pin_policy(conn, 1, policy_id=two[0])
        versions.publish_version(conn, adapter(4, DEFAULT_POLICY))
        policies.create_policy(conn, "b", "of-default", "default@4")
    deleted = retention.delete_all(database, lambda conn: retention.delete_tenant(conn, "a"))
    said = retention.finish(database, dataclasses.replace(deleted, policy_versions=(2,)))
    assert (said.num_policies, said.deleted_versions, said.cloned_versions) == (1, [1, 2], [4])
    assert said.directories_left == [str(by_hand)]
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_dir()) == ["by-hand"]
    with database.write() as conn:
        assert [each.name for each in policies.list_policies(conn)] == ["default", "support", "of-default"]
        assert two[0] not in serving.serving_states(conn)
        assert (versions.get_version(conn, 1).path, versions.get_version(conn, 1).status) == ("", "failed")
        with pytest.raises(NotFound):
            policies.get_policy(conn, two[0])
        with pytest.raises(NotFound):
            policies.create_policy(conn, "b", "stolen", "support@1")
        with pytest.raises(NotFound):
            versions.publish_version(conn, adapter(9, two[0]))
        again, is_new = policies.create_policy(conn, "a", "support")
        assert is_new
        assert again.policy_id not in two


def test_a_tenant_has_no_more_policies_than_it_may(database, two):
    with database.write() as conn:
        assert policies.create_policy(conn, "a", "brought", adapter="/adapter", max_policies=2)[1]
        assert not policies.create_policy(conn, "a", "brought", adapter="/adapter", max_policies=2)[1]
    with pytest.raises(Conflict, match="which is the limit"), database.write() as conn:
        policies.create_policy(conn, "a", "third", "default", max_policies=2)
    with database.write() as conn:
        policies.archive_policy(conn, "a", "support")
        assert two[0] not in serving.serving_states(conn)
        assert policies.create_policy(conn, "a", "third", "default", max_policies=2)[1]
        with pytest.raises(Conflict, match="which is the limit"):
            policies.archive_policy(conn, "a", "support", is_archived=False, max_policies=2)


def test_the_trained_tokens_of_a_tenant_are_those_of_its_policies(database, two):
    now = utc_now()
    with database.write() as conn:
        for update_id, policy_id in enumerate((DEFAULT_POLICY, *two), 1):
            record = update_record(update_id, policy_id=policy_id, num_tokens=10**update_id, created_at=now)
            conn.execute(schema.updates.insert().values(**rows.UPDATES.row(record)))
        assert policies.trained_tokens_since(conn, "a", now) == 100
        assert policies.trained_tokens_since(conn, "a", now + datetime.timedelta(seconds=1)) == 0


def test_the_trained_share_of_a_policy_is_that_of_its_last_update(database, two):
    made = ((two[0], 0.25), (two[1], 0.5), (two[0], 0.75), (DEFAULT_POLICY, None))
    with database.write() as conn:
        for update_id, (policy_id, share) in enumerate(made, 1):
            metrics = {} if share is None else {"trained_share": share}
            record = update_record(update_id, policy_id=policy_id, metrics=metrics)
            conn.execute(schema.updates.insert().values(**rows.UPDATES.row(record)))
        found = policies.summarise_policies(conn)
    assert [found[policy_id].trained_share for policy_id in (*two, DEFAULT_POLICY)] == [0.75, 0.5, None]


def test_what_was_trained_is_counted_by_agent_key_and_policy_with_the_reasons_of_the_rest(database):
    """Each turn has two sampled tokens. One of two turns of a trained session carried loss, and none of two others."""
    with database.write() as conn:
        versions.publish_version(conn, PolicyVersion(version=0, path="base"))
    add_finished(database, "told", tenant="t", turns=2, agent="codex", key_id="k1")
    add_finished(database, "greedy", tenant="t", agent="pi", key_id="k1", of_turns={"sampling": {"temperature": 0}})
    add_finished(database, "same", tenant="t", key_id="k2")
    add_finished(database, "other", tenant="u", agent="pi", key_id="k3")
    with database.write() as conn:
        store_fill.acknowledge(conn, 1, "told")
    add_finished(database, "waits", tenant="t", agent="pi", key_id="k1")
    with database.read() as conn:
        found = {(each.by, each.name): each for each in trained_shares(conn, "t")}
        assert {each.tenant for each in trained_shares(conn)} == {"t", "u"}
    counts = {name: (each.num_sampled, each.num_trained, each.left_out) for name, each in found.items()}
    assert counts == {
        ("agent", "codex"): (4, 2, {"not_chosen": 2}),
        ("agent", "pi"): (2, 0, {"greedy": 2}),
        ("agent", "unknown"): (2, 0, {"refused": 2}),
        ("key", "k1"): (6, 2, {"not_chosen": 2, "greedy": 2}),
        ("key", "k2"): (2, 0, {"refused": 2}),
        ("policy", "default"): (8, 2, {"not_chosen": 2, "greedy": 2, "refused": 2}),
    }
