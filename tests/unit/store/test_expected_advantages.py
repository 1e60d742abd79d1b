"""The advantages that are shown before training are those that the trainer would compute."""

from __future__ import annotations

import json

import pytest
from support.algorithms import assigned
from support.ledger_samples import add_session

from turnwise.chains import experience_json
from turnwise.store import rewards, sessions
from turnwise.store.database import Database
from turnwise.store.experiences import PER_CHAIN, experiences, with_advantages
from turnwise.store.selection import SessionFilter
from turnwise.types import Credit, Reward


def reward_steps(database: Database, session_id: str, *values: float, is_over: bool = True) -> None:
    with database.write() as connection:
        lines = [Reward(session_id=session_id, step=step, value=value) for step, value in enumerate(values)]
        rewards.add_rewards(connection, lines)
        if is_over:
            sessions.end_session(connection, "default", session_id)


@pytest.mark.parametrize("credit", Credit)
def test_the_expected_advantage_is_that_of_grpo_and_a_turn_shows_its_own_reward(database: Database, credit: Credit):
    """Three of four sessions of a group are over; the open one is shown by its name, without an advantage."""
    for name in ("a", "b", "c", "open"):
        add_session(database, name, turns=2, group_id="g", group_size=4, credit=credit)
    for name, values in (("a", (0.0, 1.0)), ("b", (2.0, 1.0)), ("c", (1.0, 4.0))):
        reward_steps(database, name, *values)
    reward_steps(database, "open", 1.0, 1.0, is_over=False)
    with database.read() as connection:
        shown = list(with_advantages(connection, SessionFilter(group_id="g"), PER_CHAIN))
        trained = list(experiences(connection, SessionFilter(group_id="g"), PER_CHAIN))
        lines = [experience_json(one) for one in with_advantages(connection, SessionFilter(session_id="b"))]
        (waiting,) = with_advantages(connection, SessionFilter(session_id="open"), PER_CHAIN)
    expected = [turns.tolist() for turns in assigned(trained, "grpo")]
    assert [experience_json(one)["advantage"] for one in shown] == expected
    assert [line["advantage"] for line in lines] == [[value] for value in expected[1]]
    own = [2.0, 1.0] if credit is Credit.STEP_WISE else [3.0, 3.0]
    assert [(line["reward"], line["return"], line["session_reward"]) for line in lines] == [
        (value, [value], 3.0) for value in own
    ]
    assert json.dumps(lines[0]).index('"reward"') < json.dumps(lines[0]).index('"session_reward"')
    assert (experience_json(waiting)["status"], experience_json(waiting)["advantage"]) == ("open", None)
