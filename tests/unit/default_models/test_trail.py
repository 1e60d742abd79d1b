import importlib.util
import json
import random
from pathlib import Path

import pytest

from turnwise.default_models import trail

AGENT = Path(__file__).parents[3] / "examples" / "trail" / "agent.py"


def follow_bosses(task: trail.TrailTask) -> tuple[str, int]:
    """Solve a task from its records; return the city and the number of lookups."""
    names = _names_on_the_trail(task)
    return task.records[names[-1]]["city"], len(names)


@pytest.mark.parametrize("index", range(50))
def test_following_each_boss_gives_the_answer_after_num_hops_lookups(index):
    """The shortest solution takes `num_hops` lookups, and one more is allowed."""
    task = trail.make_task("train", index, seed=3)
    assert follow_bosses(task) == (task.answer, task.num_hops)
    assert task.max_lookups == task.num_hops + 1


@pytest.mark.parametrize("index", range(50))
def test_a_friend_never_leads_to_the_answer(index):
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
    task = trail.make_task("train", 7, seed=1)
    random.seed(0)
    assert trail.make_task("train", 7, seed=1) == task
    for other in (trail.make_task("eval", 7, 1), trail.make_task("train", 8, 1), trail.make_task("train", 7, 2)):
        assert other.records != task.records
        assert other.task_id != task.task_id


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
def test_only_the_answer_in_the_requested_form_is_rewarded(text, expected):
    """The reward is 0 or 1; naming several cities earns nothing."""
    task = trail.make_task("eval", 0, seed=0)
    assert trail.reward(task, text.replace("{answer}", task.answer)) == expected


def test_the_task_of_an_agent_is_json_without_the_answer_and_the_number_of_hops():
    """The answer is only in the records, where the agent has to find it."""
    seen = json.loads(json.dumps(trail.make_task("eval", 0, seed=0).for_agent()))
    assert set(seen) == {"task_id", "question", "records", "max_lookups"}


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
