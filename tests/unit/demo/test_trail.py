from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest

from turnwise.demo import trail

AGENT = Path(__file__).parents[3] / "examples" / "trail" / "agent.py"


def follow_bosses(task: trail.TrailTask) -> tuple[str, int]:
    """Solve a task from its records; return the city and the number of lookups."""
    name = task.question.split("from ")[1].split(".")[0]
    lookups = 1
    while "boss" in task.records[name]:
        name = task.records[name]["boss"]
        lookups += 1
    return task.records[name]["city"], lookups


@pytest.mark.parametrize("index", range(50))
def test_following_each_boss_gives_the_answer_after_num_hops_lookups(index: int):
    """The shortest solution takes `num_hops` lookups, and one more is allowed."""
    task = trail.make_task("train", index, seed=3)
    assert follow_bosses(task) == (task.answer, task.num_hops)
    assert task.max_lookups == task.num_hops + 1


@pytest.mark.parametrize("index", range(50))
def test_a_friend_never_leads_to_the_answer(index: int):
    """From a friend on the trail no sequence of lookups reaches a record with the answer."""
    task = trail.make_task("eval", index, seed=0)
    on_trail = {name for name, record in task.records.items() if record.get("city") == task.answer}
    assert len(on_trail) == 1
    trail_names = set(_names_on_the_trail(task))
    reachable = {task.records[name]["friend"] for name in trail_names if "friend" in task.records[name]}
    while True:
        further = {value for name in reachable for value in task.records[name].values() if value in task.records}
        if further <= reachable:
            break
        reachable |= further
    assert not reachable & trail_names


def _names_on_the_trail(task: trail.TrailTask) -> list[str]:
    names = [task.question.split("from ")[1].split(".")[0]]
    while "boss" in task.records[names[-1]]:
        names.append(task.records[names[-1]]["boss"])
    return names


def test_a_task_depends_only_on_its_split_its_index_and_its_seed():
    """The arguments select the random stream: equal ones give the same task, any other one another task."""
    task = trail.make_task("train", 7, seed=1)
    random.seed(0)
    assert trail.make_task("train", 7, seed=1) == task
    for other in (trail.make_task("eval", 7, 1), trail.make_task("train", 8, 1), trail.make_task("train", 7, 2)):
        assert other.records != task.records
        assert other.task_id != task.task_id


def test_trails_of_every_length_occur_about_equally_often():
    """600 tasks over 3 lengths: 200 each, with a standard deviation of sqrt(600 · 1/3 · 2/3) = 11.5."""
    lengths = [trail.make_task("train", index, seed=0).num_hops for index in range(600)]
    assert set(lengths) == {1, 2, 3}
    assert all(150 < lengths.count(length) < 250 for length in (1, 2, 3))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('The answer is "{answer}".', 1.0),
        (' The answer is "{answer}".\n', 1.0),
        ('The answer is "Atlantis".', 0.0),
        ("{answer}", 0.0),
        ('The answer is "Atlantis". The answer is "{answer}".', 0.0),
        ("", 0.0),
    ],
)
def test_only_the_answer_in_the_requested_form_is_rewarded(text: str, expected: float):
    """The reward is 0 or 1; naming several cities earns nothing."""
    task = trail.make_task("eval", 0, seed=0)
    assert trail.reward(task, text.replace("{answer}", task.answer)) == expected


@pytest.mark.parametrize("name", ["Oslo", "", None, 3, ["Kim"]])
def test_a_lookup_of_an_unknown_person_answers_with_an_error(name: object):
    """The tool answers any arguments of a policy."""
    task = trail.make_task("eval", 0, seed=0)
    assert json.loads(trail.lookup(task.records, name)) == {"error": "nobody"}


def test_the_task_of_an_agent_is_json_without_the_answer_and_the_number_of_hops():
    """The answer is only in the records, where the agent has to find it."""
    seen = json.loads(json.dumps(trail.make_task("eval", 0, seed=0).for_agent()))
    assert set(seen) == {"task_id", "question", "records", "max_lookups"}


def test_the_warm_up_player_only_copies_from_the_latest_result():
    """Every name that it looks up or answers is in the question or in the tool's last reply, so it has no rule."""
    rng = random.Random(0)
    for index in range(200):
        task = trail.make_task("warm_up", index, seed=0)
        latest = task.question
        for message in trail.warm_up_conversation(task, rng)[2:]:
            if message["role"] == "tool":
                latest = message["content"]
            elif message["content"] is None:
                assert json.loads(message["tool_calls"][0]["function"]["arguments"])["name"] in latest
            elif message["content"] != trail.GIVING_UP:
                assert message["content"].split('"')[1] in latest


def test_the_warm_up_player_is_rarely_right():
    """For any length of the trail it answers a city with p = 0.4 and goes right at a fork with p = 0.9 / 2.

    So it is right with p = 0.4 · (1 + 0.45 + 0.45²) / 3 = 0.220, far below the demo's target.
    """
    rng = random.Random(0)
    tasks = [trail.make_task("warm_up", index, seed=0) for index in range(2000)]
    rewards = [trail.reward(task, trail.warm_up_conversation(task, rng)[-1]["content"]) for task in tasks]
    # The standard deviation of the mean is sqrt(0.220 · 0.780 / 2000) = 0.009.
    assert abs(sum(rewards) / len(rewards) - 0.220) < 0.03


def test_the_example_agent_has_the_worlds_prompt_and_tools_and_does_not_import_turnwise():
    """The agent copies both because it cannot import them; the model was warmed up on exactly these."""
    source = AGENT.read_text()
    assert "turnwise" not in source
    spec = importlib.util.spec_from_file_location("trail_agent", AGENT)
    assert spec is not None
    assert spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    assert agent.SYSTEM_PROMPT == trail.SYSTEM_PROMPT
    assert agent.TOOLS == trail.TOOLS
