from __future__ import annotations

import json

import pytest

from turnwise.errors import SettingsError
from turnwise.rollouts.tasks import Task, fill, load_tasks, unfilled


def test_a_task_is_a_line_with_an_explicit_id_or_its_line_number(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"task_id": "a", "question": "?"}\n\n{"question": "!"}\n')
    assert [(task.task_id, task.fields["question"]) for task in load_tasks(path)] == [("a", "?"), ("3", "!")]


def test_a_split_contains_its_own_tasks_and_those_without_a_split(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": 1, "split": "eval"}\n{"id": 2, "split": "train"}\n{"id": 3}\n')
    assert [task.task_id for task in load_tasks(path, "eval")] == ["1", "3"]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no task"),
        ("nonsense\n", ":1 is not JSON"),
        ('{"a": 1}\n[1]\n', ":2 is"),
        ('{"task_id": "a"}\n{"task_id": "a"}\n', "two tasks have the id 'a'"),
        ('{"task_id": {}}\n', "task_id"),
        ('{"split": "test"}\n', "'test'"),
    ],
)
def test_an_invalid_tasks_file_is_reported_in_one_sentence_with_its_line(tmp_path, text, named):
    path = tmp_path / "tasks.jsonl"
    path.write_text(text)
    with pytest.raises(SettingsError, match=named) as raised:
        load_tasks(path)
    assert "\n" not in str(raised.value)


def test_a_unicode_line_separator_inside_of_a_text_does_not_end_a_task(tmp_path):
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"id": "t1", "prompt": "first\u2028second\u0085third"}\n{"id": "t2"}\n')
    assert [task.task_id for task in load_tasks(path)] == ["t1", "t2"]


def test_different_ids_have_different_slugs():
    slugs = {Task(task_id, {}).slug for task_id in ("a/b", "a-b", "a b", "ä")}
    assert len(slugs) == 4
    assert "a-b" in slugs


def test_fields_of_the_task_in_braces_are_filled_into_the_command():
    assert fill("solve {question} in {n} steps, {unknown} {}", {"question": "1+1", "n": 2}) == (
        "solve 1+1 in 2 steps, {unknown} {}"
    )


def test_names_in_braces_that_no_task_has_are_found():
    """Variables of a shell are not among them."""
    tasks = [Task("1", {"question": "?"}), Task("2", {"hint": "!"})]
    assert unfilled(["{question} {qestion}", "{hint}{model}", "{} ${HOME}", "{qestion}"], tasks) == ["qestion"]


def test_the_fields_of_a_task_are_environment_variables():
    variables = Task("t1", {"question": "a b", "max-steps": 3, "nested": {"x": 1}}).variables()
    assert variables["TURNWISE_TASK_QUESTION"] == "a b"
    assert variables["TURNWISE_TASK_MAX_STEPS"] == "3"
    assert json.loads(variables["TURNWISE_TASK"])["nested"] == {"x": 1}
