from __future__ import annotations

import pytest

from turnwise.errors import GraderFailed
from turnwise.rewards.judge import MAX_CONVERSATION_CHARS, as_text, read_scores
from turnwise.rewards.transcript import conversation, document


def test_scores_are_read_by_number_with_other_text_around_them():
    answer = 'I compared them.\n{"number": 2, "score": 3}\n```json\n{"score": 8.5, "number": 1}\n```'
    assert read_scores(answer, 2) == [8.5, 3.0]


@pytest.mark.parametrize("answer", ["", "7 of 10", '{"number": 2, "score": 5}', '{"number": 1, "score": 11}'])
def test_an_answer_without_a_score_for_every_conversation_is_not_a_verdict(answer):
    with pytest.raises(GraderFailed, match="conversation 1"):
        read_scores(answer, 1)


def test_a_long_conversation_is_cut_in_its_middle():
    shown = {"chains": [{"messages": [{"role": "user", "content": "a" * 50_000 + "the end"}]}]}
    text = as_text(shown)
    assert len(text) < MAX_CONVERSATION_CHARS + 100
    assert text.endswith("the end")


def test_a_conversation_is_joined_from_the_new_messages_of_each_turn():
    """t1 extends t0; t2 is another branch from t0."""

    def turn(number, said, parent, chain):
        message, reply = {"role": "user", "content": said}, {"role": "assistant", "content": said.upper()}
        ids = {"turn_id": f"t{number}", "parent_turn_id": parent, "chain_id": chain}
        return {**ids, "messages": [message], "response": reply, "tools": [{"a": 1}] if parent is None else None}

    turns = [turn(0, "a", None, "t0"), turn(1, "b", "t0", "t0"), turn(2, "c", "t0", "t2")]
    shown = conversation(turns, "t1")
    assert [message["content"] for message in shown["messages"]] == ["a", "A", "b", "B"]
    assert shown["tools"] == [{"a": 1}]
    chains = document({"session_id": "s"}, turns)["chains"]
    assert [[m["content"] for m in chain["messages"]] for chain in chains] == [
        ["a", "A", "b", "B"],
        ["a", "A", "c", "C"],
    ]
