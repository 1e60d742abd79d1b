"""What is stored in a few words and numbers: sessions, updates, and what a session waits for until it is trained."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, finish, make_turn, update_record

from proxy.features.page.readings import RecentCounts
from proxy.features.page.summaries import Mean, Summary, summarise_sessions, summarise_updates
from proxy.features.training_note import training_note
from turnwise.features.page import overview, search
from turnwise.store import claims, rewards, sessions
from turnwise.store.database import Database
from turnwise.store.trainer_reports import report_status
from turnwise.store.turns import append_turns
from turnwise.types import Outcome, Reward, Session, Split


@pytest.fixture
def connection(database: Database) -> Iterator[sa.Connection]:
    with database.write() as conn:
        yield conn


def play(conn: sa.Connection, session_id: str, *turns: dict[str, Any]) -> None:
    sessions.create_session(conn, Session(session_id=session_id))
    for number, fields in enumerate(turns):
        turn = make_turn(f"t{number}", session_id=session_id, **fields)
        append_turns(conn, [dataclasses.replace(turn, turn_id=f"{session_id}-{number}")])


def summarise(conn: sa.Connection, *session_ids: str) -> list[Summary]:
    return summarise_sessions(conn, [sessions.read_session(conn, "default", each) for each in session_ids])


def test_a_summary_has_the_first_question_the_last_reply_and_the_sampled_tokens(connection):
    asked = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "An example of the agent's."},
        {"role": "assistant", "content": "Its reply."},
        {"role": "user", "content": [{"type": "text", "text": "Hi \n you"}]},
    ]
    called = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "find", "arguments": "{}"}}]}
    play(connection, "asks", {"messages": asked}, {"response": called, "outcome": Outcome.ABORTED})
    play(connection, "empty")
    first, empty = summarise(connection, "asks", "empty")
    assert (first.first_message, first.last_reply) == ("Hi you", "calls find")
    assert (first.last_outcome, first.num_sampled_tokens) == ("aborted", 4)
    assert empty == Summary(num_sampled_tokens=0)


def test_a_text_of_any_shape_is_summarised_and_a_long_one_is_cut_or_not_read(connection):
    odd: list[dict[str, Any]] = [{"role": "user", "content": None}, {"role": "user", "content": [None, 5, {"text": 3}]}]
    play(connection, "odd", {"messages": odd, "response": {"content": "x" * 1_000}})
    play(connection, "long", {"messages": [{"role": "user", "content": "x" * search.MAX_TEXT_BYTES}], "response": {}})
    odd_one, long_one = summarise(connection, "odd", "long")
    assert odd_one.first_message is None
    assert odd_one.last_reply == "x" * 299 + "…"
    assert (long_one.first_message, long_one.last_reply) == (None, None)


def note(database: Database, session_id: str = "s") -> str:
    with database.read() as connection:
        return training_note(connection, sessions.read_session(connection, "default", session_id))


@pytest.mark.parametrize("fields", [{}, {"group_id": "g", "group_size": 1}], ids=["no group", "a group of one"])
def test_the_note_of_a_single_session_states_what_will_be_done_with_it(database, fields):
    add_session(database, **fields)
    assert note(database).startswith("It has no reward yet: post one to `/v1/rewards`. It will be trained as a single")
    finish(database)
    assert note(database).startswith("It is a single session and waits for the trainer")
    assert note(database).endswith("compared with those of other single sessions of the same agent.")
    held = claims.claim(database, "t", max_groups=1, lease_seconds=60)
    with database.write() as connection:
        update = update_record(1, policy_version=0, num_groups=0, num_sessions=0, num_tokens=0)
        claims.ack(connection, claims.Finished(held, update, refused={held.groups[0].key: "uniform_rewards"}))
    assert note(database).startswith("It is a single session and was not trained: uniform_rewards.")


def test_the_note_of_a_session_is_about_the_group_of_its_own_tenant(database):
    add_session(database, group_id="g", group_size=2)
    add_session(database, "other", tenant="another", group_id="g", group_size=3)
    assert note(database).startswith("It has no reward yet: post one to `/v1/rewards`. Group 'g' has 0 of 2 sessions")
    with database.read() as connection:
        theirs = sessions.read_session(connection, "another", "other")
        assert "Group 'g' has 0 of 3 sessions" in training_note(connection, theirs)


def test_the_note_of_a_group_states_how_many_sessions_are_finished_until_it_is_ready(database):
    for session_id in ("a", "b"):
        add_session(database, session_id, group_id="g", group_size=2)
    finish(database, "a")
    assert note(database, "a") == "Group 'g' has 1 of 2 sessions that are over and have a reward. Missing: 1 not ended."
    finish(database, "b")
    assert note(database, "b") == "Group 'g' is ready."


def test_the_note_of_a_group_without_a_size_states_when_it_closes(database):
    add_finished(database, group_id="g")
    assert "has no `group_size`" in note(database)


def test_the_note_of_an_eval_session_states_that_it_is_not_trained(database):
    add_finished(database, split=Split.EVAL)
    assert note(database) == "A session of split `eval` is not trained."


def add_judged(database: Database, session_id: str, group_id: str, task_id: str, tenant: str, *values: float) -> None:
    """Store a finished session of a group of two with rewards `a`, `b` and so on."""
    add_session(database, session_id, tenant=tenant, group_id=group_id, group_size=2, task_id=task_id)
    lines = [
        Reward(session_id=session_id, tenant=tenant, value=value, name=name)
        for name, value in zip("ab", values, strict=False)
    ]
    with database.write() as connection:
        rewards.add_rewards(connection, lines)
        sessions.end_session(connection, tenant, session_id)


def test_an_update_has_the_mean_rewards_of_its_sessions_also_by_task_and_name(database):
    add_judged(database, "s1", "g1", "t1", "mine", 1.0, 0.5)
    add_judged(database, "s2", "g1", "t1", "mine", 0.0)
    add_judged(database, "s3", "g2", "t2", "mine", 1.0)
    add_judged(database, "s4", "g2", "t2", "mine", 1.0)
    add_judged(database, "s5", "g3", "t1", "theirs", 9.0)
    add_judged(database, "s6", "g3", "t1", "theirs", 9.0)
    claimed = claims.claim(database, "t", max_groups=3, lease_seconds=60)
    update = update_record(4, policy_version=2, num_sessions=2, num_tokens=8, metrics={"kl": 0.5})
    with database.write() as connection:
        claims.ack(connection, claims.Finished(claimed, update, refused={("mine", "g2"): "uniform_rewards"}))
    with database.read() as connection:
        (mine,) = summarise_updates(connection, "mine")
        (nobodys,) = summarise_updates(connection, "nobody")
    assert (mine.update_id, mine.policy_version, mine.num_tokens, mine.metrics) == (4, 2, 8, {"kl": 0.5})
    # Rewards 1.5, 0, 1 and 1: their mean is 0.875.
    assert mine.reward == Mean(0.875, 4)
    assert mine.by_kind == {"groups": Mean(0.875, 4)}
    assert mine.by_task == {"t1": Mean(0.75, 2), "t2": Mean(1.0, 2)}
    assert mine.by_name == {"a": Mean(0.75, 4), "b": Mean(0.5, 1)}
    assert mine.dropped == {"uniform_rewards": 1}
    assert (nobodys.reward, nobodys.by_task, nobodys.dropped, nobodys.metrics) == (None, {}, {}, {"kl": 0.5})


def test_single_sessions_are_a_kind_of_their_own_in_updates_and_counts(database):
    """Groups with the rewards 1 and 1, and live traffic with thumbs down: 0.5 of all would be nobody's reward."""
    add_judged(database, "s1", "g1", "t1", "mine", 1.0)
    add_judged(database, "s2", "g1", "t1", "mine", 1.0)
    for name in ("live1", "live2"):
        add_finished(database, name, value=0.0, tenant="mine")
    add_finished(database, "theirs", tenant="theirs")
    with database.read() as connection:
        counts = [overview.count_rows(connection, tenant) for tenant in ("mine", None)]
    assert [(each.groups["ready"], each.num_ready_singles) for each in counts] == [(3, 2), (4, 3)]
    claimed = claims.claim(database, "t", max_groups=3, lease_seconds=60)
    with database.write() as connection:
        claims.ack(connection, claims.Finished(claimed, update_record(4)))
    with database.read() as connection:
        (mine,) = summarise_updates(connection, "mine")
    assert mine.by_kind == {"groups": Mean(1.0, 2), "singles": Mean(0.0, 2)}


async def test_a_large_tenant_is_counted_again_after_a_second_for_every_rows_per_second(database):
    """Two sessions in two groups are four rows: at one row a second they are counted every four seconds."""
    now = 100.0
    counts = RecentCounts(database, rows_per_second=1, clock=lambda: now)
    for session_id in ("a", "b"):
        add_session(database, session_id)
    first = await counts.read("default")
    assert first.counts.sessions == {"open": 2}
    add_session(database, "c")
    now = 103.9
    kept = await counts.read("default")
    assert (kept.counts, kept.counted_at) == (first.counts, first.counted_at)
    now = 104.0
    again = await counts.read("default")
    assert again.counts.sessions == {"open": 3}
    assert again.counted_at > first.counted_at


async def test_a_small_tenant_is_always_counted(database):
    """Four rows are no more than what is counted in a second."""
    counts = RecentCounts(database, rows_per_second=4)
    for num_sessions, session_id in enumerate(("a", "b"), start=1):
        add_session(database, session_id)
        assert (await counts.read("default")).counts.sessions == {"open": num_sessions}
    add_session(database, "theirs", tenant="b")
    assert (await counts.read("b")).counts.sessions == {"open": 1}


async def test_kept_counts_hold_the_newest_reports_of_trainers(database):
    counts = RecentCounts(database, rows_per_second=1, clock=lambda: 0.0)
    add_session(database, "a")
    assert (await counts.read("default")).counts.trainers == []
    with database.write() as connection:
        report_status(connection, "one", "trains")
    (reported,) = (await counts.read("default")).counts.trainers
    assert (reported.trainer_id, reported.text, reported.starts_at) == ("one", "trains", None)
