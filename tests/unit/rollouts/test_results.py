from __future__ import annotations

import dataclasses

import pytest

from turnwise.errors import SettingsError
from turnwise.rollouts.results import MAX_TABLE_TASKS, Results, RunResult, summary, table


def result(task_id: str) -> RunResult:
    return RunResult(
        session_id=f"s-{task_id}",
        task_id=task_id,
        run=0,
        pass_index=0,
        split="train",
        reward=1.0,
        termination_reason="exit_status_0",
        num_turns=1,
        seconds=0.5,
    )


def test_results_are_read_again_under_the_same_name(tmp_path):
    with Results(tmp_path, {"command": ["a"]}) as results:
        results.add(result("t1"))
        name = results.name
    with Results(tmp_path, {"command": ["a"]}) as results:
        assert results.finished == {(0, "train", "t1", 0): result("t1")}
        assert results.name == name


def test_a_line_that_a_kill_truncated_is_dropped_and_later_lines_are_intact(tmp_path):
    with Results(tmp_path, {}) as results:
        results.add(result("t1"))
    with (tmp_path / "results.jsonl").open("a") as file:
        file.write('{"session_id": "s-t2", "task')
    with Results(tmp_path, {}) as results:
        results.add(result("t3"))
    with Results(tmp_path, {}) as results:
        assert [key[2] for key in results.finished] == ["t1", "t3"]


def test_only_one_process_at_a_time_may_write_a_directory(tmp_path):
    with Results(tmp_path, {}), pytest.raises(SettingsError, match="another `turnwise run`"):
        Results(tmp_path, {})
    with Results(tmp_path, {}):
        pass


def test_results_of_another_plan_are_refused(tmp_path):
    with Results(tmp_path, {"group_size": 8}) as results:
        results.add(result("t1"))
    with pytest.raises(SettingsError, match="group_size 8, not 4"):
        Results(tmp_path, {"group_size": 4})


def test_another_plan_replaces_one_without_a_finished_run_under_a_new_name(tmp_path):
    with Results(tmp_path, {"command": ["mistyped"]}) as results:
        name = results.name
    with Results(tmp_path, {"command": ["right"]}) as results:
        assert results.name != name
        results.add(result("t1"))
    with Results(tmp_path, {"command": ["right"]}) as results:
        assert len(results.finished) == 1


def test_groups_whose_runs_have_one_reward_are_counted():
    """t1 has 1 and 1; t2 has 1 and 0, t3 a single run, t4 no rewards, and t5 is held out."""
    runs = [("t1", 1.0), ("t1", 1.0), ("t2", 1.0), ("t2", 0.0), ("t3", 1.0), ("t4", None), ("t4", None)]
    results = [
        dataclasses.replace(result(task), run=number, reward=reward) for number, (task, reward) in enumerate(runs)
    ]
    held_out = [dataclasses.replace(result("t5"), run=run, split="eval") for run in (0, 1)]
    assert summary([*results, *held_out])["num_uniform_groups"] == 1


def test_a_table_has_a_row_for_each_of_a_few_tasks_and_one_for_all():
    few, many = ([result(f"t{number}") for number in range(count)] for count in (2, MAX_TABLE_TASKS + 1))
    assert [line.split()[0] for line in table(few)] == ["task_id", "t0", "t1", "all"]
    assert len(table(many)) == 2
