"""Pinned examples: copies of a turn's prompt that are a policy's gate, each of its tenant."""

import numpy as np
import pytest
from support.ledger_samples import add_session

from turnwise.errors import InvalidRequest, NotFound
from turnwise.features import consent, examples, retention
from turnwise.features.examples import MUST
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import list_sessions
from turnwise.types import DEFAULT_POLICY, Split, values_of

NOT_AGAIN = {"kind": "not_again"}
IMAGE = {"type": "image_url", "image_url": {"url": f"image:{'0' * 64}"}}


def labelled(conn) -> list[str]:
    return [each.session_id for each in list_sessions(conn, SessionFilter(tenant="default", label=MUST))[0]]


def test_an_example_has_the_whole_prompt_and_the_reply_and_its_session_the_label(database):
    add_session(database, "s", turns=2, of_turns={"sampling": {"temperature": 0.5}})
    with database.write() as conn:
        examples.pin(conn, "default", "s-t2", {"kind": "text", "contains": "yes", "equals": None}, note="wrong")
        (found,) = examples.of_policy(conn, DEFAULT_POLICY)
        assert labelled(conn) == ["s"]
    assert found.prompt.tolist() == [10, 11, 12, 13, 20, 21]
    assert found.reply.tolist() == [22, 23]
    assert [message["content"] for message in found.messages] == ["question 1", "answer 1", "question 2"]
    assert (found.criterion, found.sampling) == ({"kind": "text", "contains": "yes"}, {"temperature": 0.5})


def test_the_label_stays_until_the_last_example_of_a_session_is_unpinned(database):
    add_session(database, "s", turns=2)
    with database.write() as conn:
        for turn_id in ("s-t1", "s-t2"):
            examples.pin(conn, "default", turn_id, NOT_AGAIN)
        examples.unpin(conn, "default", "s-t1")
        assert labelled(conn) == ["s"]
        examples.unpin(conn, "default", "s-t2")
        assert labelled(conn) == []


def test_no_tenant_pins_reads_or_unpins_what_is_of_another_one(database):
    add_session(database, "s", tenant="a")
    with database.write() as conn:
        examples.pin(conn, "a", "a-s-t1", NOT_AGAIN)
        for refused in (examples.read_line, examples.unpin):
            with pytest.raises(NotFound, match="no example 'a-s-t1'"):
                refused(conn, "b", "a-s-t1")
        with pytest.raises(NotFound, match="no turn 'a-s-t1'"):
            examples.pin(conn, "b", "a-s-t1", NOT_AGAIN)
        assert examples.list_lines(conn, "b") == ([], False)
        assert [line.example_id for line in examples.list_lines(conn, "a")[0]] == ["a-s-t1"]


def test_what_deletes_a_session_deletes_its_examples_and_a_tenant_its_imported_ones(database):
    add_session(database, "s")
    with database.write() as conn:
        examples.pin(conn, "default", "s-t1", NOT_AGAIN)
        line = values_of(examples.read_line(conn, "default", "s-t1"))
        assert examples.import_line(conn, "b", line)
        retention.delete_session(conn, "default", "s")
        assert [each.tenant for each in examples.of_policy(conn, DEFAULT_POLICY)] == ["b"]
        retention.delete_tenant(conn, "b")
        assert examples.of_policy(conn, DEFAULT_POLICY) == []


def test_a_session_that_is_not_to_be_trained_is_no_example_any_more_and_is_not_pinned(database):
    add_session(database, "s")
    add_session(database, "t", split=Split.EVAL)
    with database.write() as conn:
        for turn_id in ("s-t1", "t-t1"):
            examples.pin(conn, "default", turn_id, NOT_AGAIN)
        consent.restrict_session(conn, "default", "s", "s~", True)
        assert [each.example_id for each in examples.of_policy(conn, DEFAULT_POLICY)] == ["t-t1"]
        with pytest.raises(InvalidRequest, match="marked as not to be trained"):
            examples.pin(conn, "default", "s-t1", NOT_AGAIN)


@pytest.mark.parametrize(
    ("of_turns", "reason"),
    [
        ({"sampling": {"response_format": {"type": "json_object"}}}, "has `response_format`"),
        ({"sampling": {"tool_choice": "required"}}, "has `tool_choice`"),
        ({"token_ids": np.empty(0, np.int32), "logprobs": np.empty(0, np.float32)}, "its tokens are not stored"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": f"image:{'0' * 64}"}}]}
                ]
            },
            "its prompt has images",
        ),
    ],
)
def test_a_turn_that_the_gate_cannot_sample_again_is_not_pinned_and_the_error_says_why(database, of_turns, reason):
    add_session(database, "s", of_turns=of_turns)
    with database.write() as conn, pytest.raises(InvalidRequest, match=reason):
        examples.pin(conn, "default", "s-t1", NOT_AGAIN)


@pytest.mark.parametrize(
    "check",
    [
        {"kind": "else"},
        {"kind": "text"},
        {"kind": "text", "equals": "a", "contains": "b"},
        {"kind": "not_again", "name": "x"},
        {"kind": "tool_call", "arguments": {}},
        {"kind": "command", "name": "../run"},
        {"kind": "command", "name": ".hidden"},
        {"kind": "rubric", "rubric": "good", "least": 2},
        {"kind": "rubric", "least": 0.5},
    ],
)
def test_a_check_that_says_nothing_clear_is_refused(check):
    with pytest.raises(InvalidRequest):
        examples.checked(check)


def test_an_export_is_imported_without_its_session_once_and_only_into_the_same_model(database):
    add_session(database, "s", of_turns={"sampling": {"temperature": 0.5}})
    with database.write() as conn:
        examples.pin(conn, "default", "s-t1", {"kind": "tool_call", "name": "look", "arguments": {"a": 1}}, note="n")
        line = values_of(examples.read_line(conn, "default", "s-t1"))
        assert [examples.import_line(conn, "b", line) for _ in range(2)] == [True, False]
        mine, other = examples.of_policy(conn, DEFAULT_POLICY, "default"), examples.of_policy(conn, DEFAULT_POLICY, "b")
        for name in ("criterion", "note", "sampling", "messages", "tools", "response"):
            assert getattr(other[0], name) == getattr(mine[0], name)
        assert (other[0].prompt.tolist(), other[0].session_id) == (mine[0].prompt.tolist(), None)
        for broken in (
            line | {"prompt_token_ids": []},
            line | {"messages": None},
            {"example_id": "x"},
            line | {"reply_token_ids": ["a"]},
        ):
            with pytest.raises(InvalidRequest):
                examples.import_line(conn, "c", broken)


def test_answers_are_kept_by_version_and_forgotten_where_the_check_is_another_one(database):
    add_session(database, "s")
    with database.write() as conn:
        first = examples.pin(conn, "default", "s-t1", NOT_AGAIN)
        examples.add_answers(conn, first, 3, 4, 5)
        assert examples.read_line(conn, "default", "s-t1").answers == {"3": [4, 5]}
        examples.pin(conn, "default", "s-t1", {"kind": "text", "contains": "a"})
        examples.add_answers(conn, first, 4, 5, 5)
        assert examples.read_line(conn, "default", "s-t1").answers == {}
        (again,) = examples.of_policy(conn, DEFAULT_POLICY)
        for version in range(60):
            examples.add_answers(conn, again, version, 1, 5)
        kept = examples.read_line(conn, "default", "s-t1").answers
        assert sorted(map(int, kept)) == list(range(10, 60))
