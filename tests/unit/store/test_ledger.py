"""Writes while agents run, on both databases."""

import dataclasses
import datetime
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.ledger_samples import add_finished, add_session, finish, groups_by_status, make_turn
from support.waiting import WAIT_SECONDS

from turnwise.errors import Conflict, InvalidRequest, NotFound
from turnwise.features import retention, rewinds, stalled, transfers
from turnwise.features.page import overview
from turnwise.store import conversations, experiences, rewards, rows, selection, serving, sessions, versions
from turnwise.store.database import Connection, Database
from turnwise.store.turns import append_rows, append_turns, find_turn, read_turn, read_turns
from turnwise.types import (
    Outcome,
    PolicyStatus,
    PolicyVersion,
    Reward,
    Session,
    SessionStatus,
    Turn,
    utc_now,
)

HOUR = datetime.timedelta(hours=1)


def stored_session(database: Database, session_id: str = "s") -> Session:
    with database.read() as connection:
        return sessions.read_session(connection, "default", session_id)


def append_and_read(connection: Connection, batch: list[Turn]) -> list[Turn]:
    append_turns(connection, batch)
    return [
        find_turn(connection, turn.tenant, turn.session_id, turn_id=turn.turn_id, request_key=turn.request_key)
        for turn in batch
    ]


def test_a_full_or_different_group_refuses_a_session(database):
    add_session(database, "a", group_id="g", group_size=1)
    with pytest.raises(Conflict, match="size 1, not 2"):
        add_session(database, "b", group_id="g", group_size=2)
    finish(database, "a")
    with pytest.raises(Conflict, match="'g' is ready"):
        add_session(database, "b", group_id="g", group_size=1)
    with pytest.raises(Conflict, match="is the id of a group"):
        add_session(database, "g")
    with pytest.raises(InvalidRequest, match="needs a group_id"):
        add_session(database, "c", group_size=2)


def test_a_turn_is_read_bit_for_bit(database):
    add_session(database, turns=0)
    turn = make_turn(
        "t1",
        step=5,
        logprobs=np.array([-1e-38, np.float32(-0.1)], np.float32),
        token_ids=np.array([0, 2**31 - 1], np.int32),
        sampling={"seed": 1},
        model="mödel\0\ud800",
        policy_version_first=1,
        policy_version_last=2,
        history_digest=b"\x00\xff",
        messages_digest=b"m",
        dialogue_digest=b"d",
        request_key="key",
        ttft_seconds=0.25,
        duration_seconds=1.5,
        reason="tools_changed",
    )
    with database.write() as connection:
        append_turns(connection, [turn])
    with database.read() as connection:
        stored = read_turn(connection, "default", "t1").turn
    placed = dataclasses.replace(turn, seq=0)
    for field in dataclasses.fields(turn):
        got, expected = getattr(stored, field.name), getattr(placed, field.name)
        if isinstance(expected, np.ndarray):
            assert got.dtype == expected.dtype
            assert got.tobytes() == expected.tobytes()
        elif field.name == "digest":
            assert got == rows.turn_digest(rows.turn_row(stored, 0))
        elif field.name == "model":
            assert got == "mödel\N{REPLACEMENT CHARACTER}?"  # characters that PostgreSQL and UTF-8 cannot store
        else:
            assert got == expected, field.name


def test_turns_of_many_sessions_are_numbered_within_their_session(database):
    add_session(database, "a", turns=0)
    add_session(database, "b", turns=0)
    first = make_turn("t1", session_id="a")
    batch = [first, make_turn("t2", session_id="b"), make_turn("t3", first, session_id="a")]
    branch = make_turn("t4", first, session_id="a", chain_id="t4")
    with database.write() as connection:
        placed = append_and_read(connection, batch)
        placed += append_and_read(connection, [branch])
    assert [(turn.seq, turn.step) for turn in placed] == [(0, 0), (0, 0), (1, 1), (2, 2)]
    session = stored_session(database, "a")
    assert (session.num_turns, session.num_chains) == (3, 2)
    assert session.last_active_at == branch.created_at


def test_a_replayed_turn_is_stored_once_and_returned(database):
    """By its id, by its request key under another id, and inside one batch."""
    add_session(database, turns=0)
    turn = make_turn("t1", request_key="key")
    retry = make_turn("t2", request_key="key")
    with database.write() as connection:
        together = append_and_read(connection, [turn, turn, retry])
        later = append_and_read(connection, [turn, retry])
    assert [one.turn_id for one in (*together, *later)] == ["t1"] * 5
    assert {one.seq for one in (*together, *later)} == {0}
    assert (stored_session(database).num_turns, stored_session(database).num_chains) == (1, 1)


def test_a_turn_must_fit_the_session_that_it_names(database):
    add_session(database, "a", turns=1)
    add_session(database, "b", turns=0)
    foreign = dataclasses.replace(make_turn("t2", session_id="b"), parent_turn_id="a-t1")
    taken = dataclasses.replace(make_turn("t2", session_id="b"), turn_id="a-t1")
    with pytest.raises(NotFound, match="'nowhere'"), database.write() as connection:
        append_turns(connection, [make_turn("t9", session_id="nowhere")])
    with pytest.raises(NotFound, match="'a-t1', which its session does not hold"), database.write() as connection:
        append_turns(connection, [foreign])
    with pytest.raises(Conflict, match="'a-t1' belongs to another session"), database.write() as connection:
        append_turns(connection, [taken])
    with database.write() as connection:
        assert append_rows(connection, []) == []


def test_a_turn_for_an_ended_session_is_stored_but_not_trained(database):
    add_finished(database, turns=1)
    late = make_turn("t2")
    broken = make_turn("t3", outcome=Outcome.ABORTED, reason="client_left")
    with database.write() as connection:
        stored = append_and_read(connection, [late, broken])
    assert [(turn.outcome, turn.reason) for turn in stored] == [
        (Outcome.UNTRAINABLE, "session_ended"),
        (Outcome.ABORTED, "client_left"),
    ]
    assert stored_session(database).num_turns == 3


def test_concurrent_writers_lose_no_turn_and_number_them_without_gaps(database):
    """Four threads append to the same two sessions, in opposite orders so that lock order matters."""
    add_session(database, "a", turns=0)
    add_session(database, "b", turns=0)

    def append(worker: int) -> None:
        for number in range(10):
            name = f"t{worker * 100 + number}"
            order = ("a", "b") if worker % 2 else ("b", "a")
            batch = [dataclasses.replace(make_turn(name, session_id=one), turn_id=f"{one}-{name}") for one in order]
            with database.write() as connection:
                append_turns(connection, batch)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(append, range(4), timeout=WAIT_SECONDS))
    with database.read() as connection:
        for session_id in ("a", "b"):
            index, _ = conversations.unknown_turns(connection, "default", session_id, first=0, known=())
            assert [entry.seq for entry in index] == list(range(40))


def test_ending_twice_changes_nothing_and_an_expired_session_cannot_end(database):
    add_session(database, "a")
    with database.write() as connection:
        first = sessions.end_session(connection, "default", "a", "env_done")
        again = sessions.end_session(connection, "default", "a", "timeout")
    assert (first.status, first.termination_reason) == (SessionStatus.ENDED, "env_done")
    assert again == first
    add_session(database, "b")
    with database.write() as connection:
        assert sessions.expire_idle_sessions(connection, utc_now() + HOUR) == [("default", "b")]
    with pytest.raises(Conflict, match="'b' has expired"), database.write() as connection:
        sessions.end_session(connection, "default", "b")
    with pytest.raises(NotFound, match="'c'"), database.write() as connection:
        sessions.end_session(connection, "default", "c")


def test_a_session_is_finished_when_it_has_ended_and_has_a_reward_in_any_order(database):
    for session_id in ("end_last", "reward_last", "expired"):
        add_session(database, session_id)
    finish(database, "end_last")
    assert groups_by_status(database) == {"ready": 1, "open": 2}
    with database.write() as connection:
        sessions.end_session(connection, "default", "reward_last")
    assert groups_by_status(database) == {"ready": 1, "open": 2}
    for _ in range(2):  # a revision does not finish it again
        with database.write() as connection:
            rewards.add_rewards(connection, [Reward(session_id="reward_last", value=1)])
    assert groups_by_status(database) == {"ready": 2, "open": 1}
    with database.write() as connection:
        rewards.add_rewards(connection, [Reward(session_id="expired", value=1)])
        sessions.expire_idle_sessions(connection, utc_now() + HOUR)
    assert groups_by_status(database) == {"ready": 3}


def test_a_group_is_ready_when_as_many_sessions_as_its_size_are_finished(database):
    for session_id in ("a", "b", "c"):
        add_session(database, session_id, turns=0, group_id="g", group_size=2)
    finish(database, "a")
    assert groups_by_status(database) == {"open": 1}
    finish(database, "c")
    assert groups_by_status(database) == {"ready": 1}
    finish(database, "b")  # one more than needed changes nothing
    assert groups_by_status(database) == {"ready": 1}


def test_rewards_apply_to_turns_steps_and_sessions_and_return_the_number_of_turns(database):
    add_session(database, turns=0)
    with database.write() as connection:
        append_turns(connection, [make_turn(f"t{n}", step=step) for n, step in ((1, 0), (2, 0), (3, 1))])
        reached = rewards.add_rewards(
            connection,
            [
                Reward(session_id="s", turn_id="t1", value=1),
                Reward(session_id="", turn_id="t3", value=2),
                Reward(session_id="s", step=0, value=3, source="verifier", written_by="key", name="style"),
                Reward(session_id="s", value=4),
            ],
        )
    assert reached == [1, 1, 2, 3]
    with database.read() as connection:
        views, _ = read_turns(connection, "default", "s")
    assert [[line.value for line in view.rewards] for view in views] == [[1, 3], [3], [2]]
    assert views[1].rewards[0].source == "verifier"


@pytest.mark.parametrize(
    ("line", "error", "says"),
    [
        (Reward(session_id="x", value=1), NotFound, "'x'"),
        (Reward(session_id="s", turn_id="x", value=1), NotFound, "no turn 'x' in session 's'"),
        (Reward(session_id="x", turn_id="s-t1", value=1), NotFound, "no turn 's-t1' in session 'x'"),
        (Reward(session_id="", turn_id="s-t1", value=1, tenant="other"), NotFound, "no turn 's-t1'"),
        (Reward(session_id="s", step=7, value=1), NotFound, "step 7"),
        (Reward(session_id="s", value=float("nan")), InvalidRequest, "nan"),
        (Reward(session_id="s", value=float("-inf")), InvalidRequest, "-inf"),
        (Reward(session_id="s", turn_id="s-t1", step=0, value=1), InvalidRequest, "not both"),
    ],
)
def test_an_invalid_reward_refuses_its_whole_list(database, line, error, says):
    add_session(database)
    good = Reward(session_id="s", value=1, tenant=line.tenant)
    lines = [good, line] if line.tenant == "default" else [line]
    with pytest.raises(error, match=says), database.write() as connection:
        rewards.add_rewards(connection, lines)
    assert stored_session(database).reward is None


def test_a_replayed_reward_post_gets_its_first_answer_and_writes_nothing(database):
    add_session(database, turns=2)
    for _ in range(2):
        with database.write() as connection:
            lines = [Reward(session_id="s", value=1)]
            assert rewards.add_rewards(connection, lines, idempotency_key="k", body_digest=b"a") == [2]
    with database.read() as connection:
        assert overview.count_rows(connection).num_rewards == 1
    with pytest.raises(Conflict, match="'k' was used with another body"), database.write() as connection:
        rewards.add_rewards(connection, [Reward(session_id="s", value=2)], idempotency_key="k", body_digest=b"b")
    with database.write() as connection:
        assert rewards.add_rewards(connection, []) == []


def test_a_key_that_was_used_for_one_session_is_free_for_all_others(database):
    """Else one session's agent could use up the key of another one's grader. The deletion of its session frees it."""
    for session_id in ("s", "t"):
        add_session(database, session_id)
    posts = [["t"], ["s"], ["s", "t"]]
    for body, session_ids in enumerate(posts):
        with database.write() as connection:
            lines = [Reward(session_id=session_id, value=1) for session_id in session_ids]
            rewards.add_rewards(connection, lines, idempotency_key="k", body_digest=bytes([body]))
    with database.write() as connection:
        assert overview.count_rows(connection).num_rewards == 4
        retention.delete_session(connection, "default", "t")
    add_session(database, "t", turns=0)
    with database.write() as connection:
        lines = [Reward(session_id="t", value=2)]
        assert rewards.add_rewards(connection, lines, idempotency_key="k", body_digest=b"new") == [0]


def test_tenants_have_answers_of_their_own_to_one_key_for_sessions_of_one_name(database):
    add_session(database, "s", turns=2)
    add_session(database, "s", tenant="other", turns=0)
    with database.write() as connection:
        for _ in range(2):
            for tenant, turns in (("default", 2), ("other", 0)):
                lines = [Reward(session_id="s", tenant=tenant, value=1)]
                assert rewards.add_rewards(connection, lines, idempotency_key="k") == [turns]
        assert overview.count_rows(connection).num_rewards == 2


def test_a_refused_post_does_not_use_its_idempotency_key(database):
    """Otherwise the corrected post under the same key would be refused forever."""
    add_session(database)
    with pytest.raises(NotFound), database.write() as connection:
        rewards.add_rewards(connection, [Reward(session_id="x", value=1)], idempotency_key="k", body_digest=b"a")
    with database.write() as connection:
        lines = [Reward(session_id="s", value=1)]
        assert rewards.add_rewards(connection, lines, idempotency_key="k", body_digest=b"b") == [1]


def test_stalled_groups_are_trained_on_their_finished_sessions_or_dropped(database):
    add_session(database, "a", turns=0, group_id="some", group_size=2)
    add_session(database, "b", turns=0, group_id="some", group_size=2)
    add_session(database, "c", turns=0, group_id="none", group_size=2)
    add_session(database, "d", turns=0, group_id="unsized")
    finish(database, "a")
    finish(database, "d")
    with database.write() as connection:
        assert stalled.stalled(utc_now() - HOUR, "train").make(connection) == []
        closed = stalled.stalled(utc_now() + HOUR, "train").make(connection)
    assert sorted(closed) == ["some", "unsized"]
    assert groups_by_status(database) == {"ready": 2, "open": 1}
    with database.write() as connection:
        assert stalled.stalled(utc_now() + HOUR, "drop").make(connection) == ["none"]
    assert groups_by_status(database) == {"ready": 2, "dropped": 1}


def test_a_group_with_an_active_session_is_not_stalled(database):
    """Turns do not touch the group's row: the session's own activity counts."""
    long_ago = utc_now() - 2 * HOUR
    add_session(database, turns=0, group_id="g", created_at=long_ago)
    with database.write() as connection:
        append_turns(connection, [make_turn("t1")])
        assert stalled.stalled(utc_now() - HOUR, "drop").make(connection) == []


def test_policies_are_published_once_activated_retired_and_pinned(database):
    with database.write() as connection:
        assert serving.serving_state(connection).active is None
        assert serving.serving_state(connection).newest is None
        assert serving.serving_state(connection).pinned_version is None
        for version in (0, 1, 2):
            assert versions.publish_version(connection, PolicyVersion(version=version, path=f"/{version}"))
        assert not versions.publish_version(connection, PolicyVersion(version=1, path="/1"))
        serving.activate_version(connection, 0)
        active = serving.activate_version(connection, 1, reload_seconds=0.5)
        assert (active.status, active.reload_seconds) == (PolicyStatus.ACTIVE, 0.5)
        assert versions.get_version(connection, 0).status is PolicyStatus.RETIRED
        failed = serving.fail_version(connection, 2, "not finite", {"engine_answer": 1})
        assert (failed.status, failed.error) == (PolicyStatus.FAILED, "not finite")
        assert failed.metrics == {"engine_answer": 1}
        newest = serving.serving_state(connection).newest
        assert newest.version == 1
        rewinds.pin_policy(connection, 0)
        assert serving.serving_state(connection).pinned_version == 0
        rewinds.pin_policy(connection, None)
        assert serving.serving_state(connection).pinned_version is None
        page, has_more = versions.list_versions(connection, limit=2)
        assert ([policy.version for policy in page], has_more) == ([2, 1], True)
        rest, has_more = versions.list_versions(connection, after=1)
        assert ([policy.version for policy in rest], has_more) == ([0], False)
    for change in (
        lambda connection: serving.activate_version(connection, 9),
        lambda connection: serving.fail_version(connection, 9, ""),
        lambda connection: rewinds.choose_version(connection, 9, pin=True),
    ):
        with pytest.raises(NotFound, match="version 9"), database.write() as connection:
            change(connection)
    with database.read() as connection:
        active_now = serving.serving_state(connection).active
    assert active_now.version == 1  # a failed activation left it in place
    with pytest.raises(Conflict, match="'/1', not '/other'"), database.write() as connection:
        versions.publish_version(connection, PolicyVersion(version=1, path="/other"))


def test_a_version_is_published_before_it_is_written_and_fails_if_it_never_is(database):
    base = PolicyVersion(version=0, path="/0")
    three = [PolicyVersion(version=number, path=f"/{number}", update_id=number) for number in (1, 2, 3)]
    with database.write() as connection:
        for policy in (base, *three):
            assert versions.publish_version(connection, policy)
        assert not versions.publish_version(connection, dataclasses.replace(three[1], weights_digest="two"))
        assert not versions.publish_version(connection, three[1])
        assert versions.get_version(connection, 2).weights_digest == "two"
        assert transfers.fail_unwritten(connection, after=1) == [3]
        assert transfers.fail_unwritten(connection, after=1) == []
        assert versions.get_version(connection, 3).error == versions.LOST
        assert [versions.get_version(connection, number).is_written for number in (0, 1, 2, 3)] == [
            True,
            False,
            True,
            False,
        ]


def test_old_idempotent_answers_are_deleted(database):
    """A newer answer is returned again; an older one is deleted, so its key appends again."""
    add_session(database, turns=1)
    lines = [Reward(session_id="s", value=1)]
    with database.write() as connection:
        rewards.add_rewards(connection, lines, idempotency_key="k", body_digest=b"a")
        assert rewards.forget_answers(connection, utc_now() - HOUR) == 0
        assert rewards.add_rewards(connection, lines, idempotency_key="k", body_digest=b"a") == [1]
        assert overview.count_rows(connection).num_rewards == 1
        assert rewards.forget_answers(connection, utc_now() + HOUR) == 1
        rewards.add_rewards(connection, lines, idempotency_key="k", body_digest=b"b")
        assert overview.count_rows(connection).num_rewards == 2


def test_idle_sessions_expire_in_batches(database, monkeypatch):
    monkeypatch.setattr(sessions, "CLOSED_AT_ONCE", 3)
    for number in range(5):
        add_session(database, f"s{number}")
    later = utc_now() + HOUR
    with database.write() as connection:
        assert len(sessions.expire_idle_sessions(connection, later)) == 3
    with database.write() as connection:
        assert len(sessions.expire_idle_sessions(connection, later)) == 2


def test_one_of_several_turns_that_extend_one_turn_concurrently_continues_its_chain(database):
    """In one transaction or in several, whatever chain id each of them has."""
    with database.write() as connection:
        sessions.create_session(connection, Session(session_id="s"))
        root = make_turn("t1", session_id="s")
        first = [make_turn(name, root, session_id="s") for name in ("t2", "t3")]
        stored = append_and_read(connection, [root, *first])
    with database.write() as connection:
        later = [make_turn("t4", root, session_id="s"), make_turn("t5", first[1], session_id="s")]
        stored += append_and_read(connection, later)
        session = sessions.read_session(connection, "default", "s")
    chains = {turn.turn_id: turn.chain_id for turn in stored}
    assert chains == {"t1": "t1", "t2": "t1", "t3": "t3", "t4": "t4", "t5": "t3"}
    assert session.num_chains == 3


def test_the_versions_of_a_chain_are_the_oldest_and_the_newest_also_after_a_roll_back_within_a_turn(database):
    """Version 3 sampled the second turn's first token. The chain is not one that version 2 sampled alone."""
    add_session(database, turns=0)
    first = make_turn("t1", policy_version_first=2, policy_version_last=2)
    second = make_turn("t2", first, policy_version_first=3, policy_version_last=2)
    with database.write() as connection:
        append_turns(connection, [first, second])
    finish(database)
    with database.read() as connection:
        (chain,) = experiences.experiences(connection, selection.SessionFilter(), experiences.PER_CHAIN)
    assert (chain.policy_version_first, chain.policy_version_last) == (2, 3)
