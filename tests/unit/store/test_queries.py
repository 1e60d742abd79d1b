"""Read models: whole prompts, pages, filters, experiences and their dry run."""

import dataclasses
import datetime
from collections.abc import Iterator

import numpy as np
import pytest
import sqlalchemy as sa
from support.ledger_samples import add_session, finish, make_turn
from support.store_fill import acknowledge

from turnwise.errors import NotFound
from turnwise.features import inferred, roles
from turnwise.features.page import overview
from turnwise.features.page.turns import session_credit
from turnwise.store import conversations, experiences, groups, rewards, selection, turns, updates, versions
from turnwise.store.database import Database
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import create_session, end_session, list_sessions, read_session, read_session_with_rewards
from turnwise.types import Credit, Outcome, Reward, Role, Session, SessionStatus, Split, utc_now


@pytest.fixture
def forest(database: Database) -> Database:
    with database.write() as connection:
        create_session(connection, Session(session_id="s", task_id="task"))
        t1 = make_turn("t1")
        t2 = make_turn("t2", t1, history_digest=b"h2", messages_digest=b"m2", dialogue_digest=b"d2")
        t3 = make_turn("t3", t1, chain_id="t3")
        t4 = make_turn("t4", t2, request_key="key")
        turns.append_turns(connection, [t1, t2, t3, t4])
    return database


@pytest.fixture
def connection(forest: Database) -> Iterator[sa.Connection]:
    with forest.read() as opened:
        yield opened


def test_a_turn_is_read_with_its_whole_prompt(connection):
    view = turns.read_turn(connection, "default", "t4")
    assert view.prompt_token_ids.tolist() == [10, 11, 12, 13, 20, 21, 22, 23, 40, 41]
    assert view.prompt_token_ids.size == view.turn.prompt_length
    assert [message["content"] for message in view.messages] == [
        "question 1",
        "answer 1",
        "question 2",
        "answer 2",
        "question 4",
    ]
    assert view.tools == [{"type": "function"}]


def test_a_branch_does_not_see_its_sibling(connection):
    view = turns.read_turn(connection, "default", "t3")
    assert view.prompt_token_ids.tolist() == [10, 11, 12, 13, 30, 31]
    assert conversations.full_tokens(connection, "t3").tolist() == [10, 11, 12, 13, 30, 31, 32, 33]
    assert [message["content"] for message in view.messages] == ["question 1", "answer 1", "question 3"]
    assert view.tools == [{"type": "function"}]


def test_turns_are_paged_and_keep_their_ancestors(connection):
    whole, has_more = turns.read_turns(connection, "default", "s", limit=None)
    assert ([view.turn.turn_id for view in whole], has_more) == (["t1", "t2", "t3", "t4"], False)
    page, has_more = turns.read_turns(connection, "default", "s", limit=2, after="t1")
    assert ([view.turn.turn_id for view in page], has_more) == (["t2", "t3"], True)
    rest, has_more = turns.read_turns(connection, "default", "s", limit=2, after="t3")
    assert ([view.turn.turn_id for view in rest], has_more) == (["t4"], False)
    assert rest[0].prompt_token_ids.tolist() == whole[3].prompt_token_ids.tolist()
    assert turns.read_turns(connection, "default", "s", after="t4") == ([], False)


def test_an_unknown_id_is_named(connection):
    for ask, says in (
        (lambda: read_session(connection, "other", "s"), "no session 's'"),
        (lambda: turns.read_turn(connection, "other", "t1"), "no turn 't1'"),
        (lambda: roles.set_chain_role(connection, "other", "t1", Role.SIDE), "no turn 't1'"),
        (lambda: turns.turns_to(connection, "t1", "other"), "no turn 't1'"),
        (lambda: turns.read_turn(connection, "default", "t9"), "no turn 't9'"),
        (lambda: turns.read_turns(connection, "default", "x"), "no session 'x'"),
        (lambda: turns.read_turns(connection, "default", "s", after="t9"), "no turn 't9'"),
        (lambda: conversations.full_tokens(connection, "t9"), "no turn 't9'"),
        (lambda: versions.get_version(connection, 7), "policy version 7"),
    ):
        with pytest.raises(NotFound, match=says):
            ask()


def test_only_unknown_turns_are_read_with_the_messages_that_they_add(connection):
    """The second read starts after the turns of the first one."""
    found, num_read = conversations.unknown_turns(connection, "default", "s", first=0, known={"t1", "t3"})
    assert ([turn.turn_id for turn in found], num_read) == (["t2", "t4"], 4)
    assert (found[0].history_digest, found[0].messages_digest, found[0].dialogue_digest) == (b"h2", b"m2", b"d2")
    assert (found[0].messages, found[0].parent_turn_id) == ([{"role": "user", "content": "question 2"}], "t1")
    assert (found[0].prompt_length, found[0].token_ids.tolist(), found[0].prompt_delta.size) == (6, [22, 23], 0)
    assert conversations.unknown_turns(connection, "default", "s", first=num_read, known=()) == ([], 4)
    assert conversations.unknown_turns(connection, "default", "s", first=0, known={"t1", "t2", "t3", "t4"}) == ([], 4)
    assert conversations.unknown_turns(connection, "default", "unknown", first=0, known=()) == ([], 0)


def test_the_newest_session_that_continues_an_id_ends_an_unbroken_row(database):
    names = ["s", *(f"s~{number}" for number in (*range(2, 13), 14)), "t~2"]
    with database.write() as connection:
        for name in names:
            create_session(connection, Session(session_id=name, task_id="task"))
        create_session(connection, Session(session_id="s~13", tenant="other", task_id="task"))
    with database.read() as connection:
        found = [conversations.newest_generation(connection, "default", prefix) for prefix in ("s~", "t~", "u~")]
    assert found == [12, 2, 1]


def test_a_name_finds_the_session_of_its_tenant_alone(database):
    """Another tenant's session of the same name has a call with a key, a reward, and an update that trained it."""
    add_session(database, "s")
    add_session(database, "s", tenant="t")
    with database.write() as connection:
        turn = make_turn("t9", tenant="t", request_key="key")
        turns.append_turns(connection, [turn])
    finish(database, "s", tenant="t")
    with database.write() as connection:
        acknowledge(connection, 1, "s")
        for tenant, is_theirs in (("default", False), ("t", True)):
            assert bool(turns.find_turn(connection, tenant, "s", request_key="key")) is is_theirs
            assert selection.sessions_of_turns(connection, tenant, ["t9"]) == ({"t9": "s"} if is_theirs else {})
            assert bool(read_session_with_rewards(connection, tenant, "s")[1]) is is_theirs
            assert updates.last_updates(connection, tenant, ["s"]) == ({"s": 1} if is_theirs else {})


def test_sessions_are_filtered_and_paged_newest_first(database):
    add_session(database, "a", task_id="x", group_id="g")
    add_session(database, "b", task_id="x", split=Split.EVAL)
    add_session(database, "c", task_id="y", tenant="other")
    finish(database, "a", value=2)

    def found(wanted: SessionFilter, **page: object) -> tuple[list[str], bool]:
        with database.read() as connection:
            sessions, has_more = list_sessions(connection, wanted, **page)
        return [session.session_id for session in sessions], has_more

    assert found(SessionFilter()) == (["c", "b", "a"], False)
    assert found(SessionFilter(tenant="default", task_id="x")) == (["b", "a"], False)
    assert found(SessionFilter(tenant="default"), limit=1) == (["b"], True)
    assert found(SessionFilter(tenant="default"), limit=1, after="b") == (["a"], False)
    assert found(SessionFilter(group_id="g")) == (["a"], False)
    assert found(SessionFilter(split=Split.EVAL)) == (["b"], False)
    assert found(SessionFilter(status=SessionStatus.ENDED)) == (["a"], False)
    assert found(SessionFilter(session_id="c")) == (["c"], False)
    with pytest.raises(NotFound, match="'z'"):
        found(SessionFilter(tenant="default"), after="z")
    with pytest.raises(ValueError, match="tenant"):
        found(SessionFilter(), after="a")


@pytest.mark.parametrize(
    ("condition", "found"),
    [("shop=a", ["low"]), ("shop=A", ["high"]), ("SHOP=a", []), ("n=1", ["low"]), ("n=10", ["high"]), ("shop=%", [])],
)
def test_a_pair_of_metadata_is_found_in_its_own_case_alone(database, condition, found):
    add_session(database, "low", metadata={"shop": "a", "n": 1})
    add_session(database, "high", metadata={"n": 10, "shop": "A"})
    with database.read() as connection:
        sessions, _ = list_sessions(connection, SessionFilter(metadata=condition))
    assert [session.session_id for session in sessions] == found


def test_experiences_are_those_of_ended_and_rewarded_sessions(forest):
    def found(wanted: SessionFilter) -> list[str]:
        with forest.read() as connection:
            return [one.turn_ids[0] for one in experiences.experiences(connection, wanted)]

    assert found(SessionFilter()) == []
    with forest.write() as connection:
        rewards.add_rewards(connection, [Reward(session_id="s", value=1)])
    assert found(SessionFilter()) == []
    assert found(SessionFilter(status=SessionStatus.OPEN)) == ["t1", "t2", "t3", "t4"]
    with forest.write() as connection:
        end_session(connection, "default", "s", "env_done")
    assert found(SessionFilter()) == ["t1", "t2", "t3", "t4"]
    assert found(SessionFilter(task_id="other")) == []


def test_an_experience_per_chain_carries_each_turns_return(forest):
    """Steps 0 to 3 with rewards 1, 2, 0, 4 and γ = 0.5: returns 1 + 0.5·3 = 2.5, 2 + 0.5·2 = 3, 2, 4.

    The reward of step 1 was posted for its only turn, t2.
    """
    with forest.write() as connection:
        lines = [Reward(session_id="s", step=step, value=value) for step, value in ((0, 1), (3, 4))]
        rewards.add_rewards(connection, [*lines, Reward(session_id="s", turn_id="t2", value=2)])
        end_session(connection, "default", "s", "env_done")
    with forest.read() as connection:
        trunk, branch = experiences.experiences(
            connection, SessionFilter(), experiences.Shape(credit=Credit.STEP_WISE, gamma=0.5, merge="chain")
        )
    assert (trunk.turn_ids, trunk.turn_steps) == (("t1", "t2", "t4"), (0, 1, 3))
    assert trunk.turn_rewards.tolist() == [1, 2, 4]
    assert trunk.turn_own_rewards.tolist() == [0, 2, 0]
    assert trunk.turn_returns.tolist() == [2.5, 3, 4]
    assert trunk.reward == 7
    assert trunk.tokens.tolist() == [10, 11, 12, 13, 20, 21, 22, 23, 40, 41, 42, 43]
    assert trunk.prompt_length == 2
    assert trunk.eid.uid == "s/task/0/0/t1"
    assert (trunk.info["termination_reason"], trunk.info["metadata"]) == ("env_done", {})
    assert branch.turn_ids == ("t3",)
    assert branch.loss_mask.tolist() == [False] * 6 + [True] * 2
    assert branch.turn_returns.tolist() == [2]


def test_experience_arrays_are_the_readers_own(forest):
    """A trainer passes them to torch, which refuses read-only memory."""
    finish(forest)
    with forest.read() as connection:
        found = list(experiences.experiences(connection, SessionFilter(), experiences.PER_CHAIN))
        assert found
        for one in found:
            assert all(array.flags.writeable for array in (one.tokens, one.logprobs, one.turn_index, one.loss_mask))
            assert one.logprobs.dtype == np.float32


def test_counts_equal_the_content_of_the_store(forest):
    finish(forest)
    add_session(forest, "other", turns=0)
    with forest.read() as connection:
        counts = overview.count_rows(connection)
    assert counts.sessions == {"ended": 1, "open": 1}
    assert counts.groups == {"ready": 1, "open": 1}
    assert (counts.num_turns, counts.num_rewards, counts.num_updates) == (4, 1, 0)
    add_session(forest, "theirs", tenant="b")
    with forest.read() as connection:
        assert overview.count_rows(connection, "default") == counts
        assert overview.count_rows(connection, "b") == overview.Counts({"open": 1}, {"open": 1}, 0, 1, 0, 0, 0, [])
        assert overview.count_rows(connection, "nobody") == overview.Counts({}, {}, 0, 0, 0, 0, 0, [])
    long_ago = utc_now() - datetime.timedelta(hours=2)
    others = {"session_id": "other", "outcome": Outcome.ERROR}
    with forest.write() as connection:
        turns.append_turns(connection, [make_turn("t8", **others), make_turn("t9", **others, created_at=long_ago)])
        assert [overview.count_rows(connection, tenant).num_failed_calls for tenant in ("default", "b")] == [1, 0]


def test_unfinished_groups_are_counted_up_to_a_limit_in_each_state(database, monkeypatch):
    for session_id in ("a", "b", "c"):
        add_session(database, session_id)
    finish(database, "c")
    with database.read() as connection:
        assert groups.unfinished_groups(connection) == {"open": 2, "ready": 1, "claimed": 0}
        monkeypatch.setattr(groups, "MOST_UNFINISHED", 1)
        assert groups.unfinished_groups(connection) == {"open": 1, "ready": 1, "claimed": 0}


def test_a_conversation_is_found_by_the_longest_part_of_it(database):
    """All sessions that contain it are returned, the oldest first, up to a limit."""
    for session_id, digests in {"a": (b"1", b"2"), "b": (b"1",), "c": (b"1", b"3")}.items():
        add_session(database, session_id, turns=0)
        with database.write() as connection:
            for number, digest in enumerate(digests):
                turn = make_turn(f"t{number}", session_id=session_id, history_digest=digest, inferred_by="key")
                turns.append_turns(connection, [dataclasses.replace(turn, turn_id=f"{session_id}{number}")])
    with database.read() as connection:
        found = [
            inferred.sessions_of_conversation(connection, "default", "key", digests, limit=2)
            for digests in ([b"2", b"1"], [b"9", b"1"], [b"9"], [])
        ]
    assert found == [(b"2", ["a"]), (b"1", ["b", "c"]), (b"", []), (b"", [])]


def test_a_conversation_is_found_only_by_its_own_key_tenant_and_policy_in_an_open_session(database):
    """A turn whose call named its session is not found."""
    sessions = {"mine": {}, "over": {}, "named": {}, "theirs": {"tenant": "b"}, "of another policy": {"policy_id": 7}}
    for session_id, fields in sessions.items():
        add_session(database, session_id, turns=0, **fields)
        by = None if session_id == "named" else "key"
        turn = make_turn("t1", session_id=session_id, history_digest=session_id.encode(), inferred_by=by, **fields)
        with database.write() as connection:
            turns.append_turns(connection, [dataclasses.replace(turn, turn_id=f"{session_id}-t1")])
    finish(database, "over")
    with database.read() as connection:
        found = {
            session_id: inferred.sessions_of_conversation(connection, "default", "key", [session_id.encode()], limit=9)
            for session_id in sessions
        }
        other_key = inferred.sessions_of_conversation(connection, "default", "key2", [b"mine"], limit=9)
    assert found == {
        "mine": (b"mine", ["mine"]),
        "over": (b"", []),
        "named": (b"", []),
        "theirs": (b"", []),
        "of another policy": (b"", []),
    }
    assert other_key == (b"", [])


def test_a_session_has_the_credit_of_its_own_policy(database):
    add_session(database, "s", turns=2, credit=Credit.STEP_WISE, gamma=0.5)
    with database.write() as connection:
        rewards.add_rewards(connection, [Reward(session_id="s", step=step, value=1.0) for step in (0, 1)])
    with database.read() as connection:
        credit = session_credit(connection, selection.session_row(connection, "default", "s").session_pk, 0)
    assert credit.turn_rewards == {"s-t1": 1.0, "s-t2": 1.0}
    # 1 + 0.5 * 1 = 1.5
    assert credit.turn_returns == {"s-t1": 1.5, "s-t2": 1.0}
