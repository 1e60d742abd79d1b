from __future__ import annotations

import pytest

from turnwise.rewards.next_state import is_error, judge_turns
from turnwise.rewards.verdict import Reward


def turn(number, messages, calls=(), parent=None):
    response = {"role": "assistant", "content": "", "tool_calls": [{"function": each} for each in calls]}
    return {
        "turn_id": f"t{number}",
        "parent_turn_id": parent,
        "chain_id": "t0",
        "messages": messages,
        "response": response,
    }


def conversation(*turns):
    """Return a session in which each turn extends the one before it."""
    made = [turn(n, messages, calls, f"t{n - 1}" if n else None) for n, (messages, calls) in enumerate(turns)]
    return {"turns": made}


READ = {"name": "read", "arguments": '{"path": "a"}'}


def tool(text):
    return [{"role": "tool", "content": text}]


def user(text):
    return [{"role": "user", "content": text}]


def test_the_next_message_judges_the_turn_before_it():
    """Turn 0 gets a tool error, turn 1 repeats turn 0's call, turn 2 is thanked; turn 3 is the last."""
    session = conversation(
        (user("read a"), [READ]),
        (tool('{"error": "no such file"}'), [{"name": "read", "arguments": '{ "path":"a" }'}]),
        (tool("content"), []),
        (user("Thanks, that is it"), []),
    )
    assert judge_turns(session) == [
        Reward(-1.0, turn_id="t0"),
        Reward(-0.5, turn_id="t1"),
        Reward(1.0, turn_id="t2"),
    ]


@pytest.mark.parametrize(
    "said", ["No, the other file", "That's wrong.", "it still fails", "It doesn't work", "you forgot the test"]
)
def test_a_correction_judges_the_turn_that_it_corrects(said):
    assert judge_turns(conversation((user("do it"), []), (user(said), []))) == [Reward(-1.0, turn_id="t0")]


@pytest.mark.parametrize("said", ["And now the second file", "No problem, go on", "What is a stop sign?"])
def test_an_ordinary_message_gives_no_reward(said):
    assert judge_turns(conversation((user("do it"), []), (user(said), []))) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Traceback (most recent call last):\n  …", True),
        ("ValueError: no", True),
        ("<returncode>1</returncode>\n<output>", True),
        ("<returncode>0</returncode>\n<output>", False),
        ('{"error": null, "city": "Oslo"}', False),
        ('{"is_error": true}', True),
        ("sh: foo: command not found", True),
        ("0 errors found", False),
    ],
)
def test_errors_are_recognised_in_tool_results(text, expected):
    assert is_error(text) is expected
