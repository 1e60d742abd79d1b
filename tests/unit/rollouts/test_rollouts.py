"""Tasks, agents, pace and results of `turnwise run`."""

import asyncio
import dataclasses
import json
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from turnwise.errors import GraderFailed, SettingsError
from turnwise.processes.limited import with_script
from turnwise.rollouts.agents import AGENTS, Address, command_line, environment, find_agent, write_files
from turnwise.rollouts.grading import restore_named
from turnwise.rollouts.results import MAX_TABLE_TASKS, Results, RunResult, summary, table
from turnwise.rollouts.runner import Pace
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
    """Variables of a shell are left to it."""
    assert fill("solve {question} in {n} steps, {unknown} {} ${n}", {"question": "1+1", "n": 2}) == (
        "solve 1+1 in 2 steps, {unknown} {} ${n}"
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


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address("http://127.0.0.1:8100/sessions/s1/v1", "key-1", "demo", tmp_path / "home")


def test_an_agent_is_identified_by_its_program():
    assert find_agent(["/opt/bin/codex", "exec"]).name == "codex"
    assert find_agent(["python", "agent.py"]).name == "any"
    assert find_agent(["npx", "codex"], "codex").name == "codex"
    with pytest.raises(SettingsError, match="'codx'"):
        find_agent(["npx"], "codx")


@pytest.mark.parametrize("name", sorted(AGENTS))
def test_every_known_agent_gets_the_address_of_its_session(name, address):
    agent = AGENTS[name]
    write_files(agent, address)
    for path in address.home.rglob("*.json"):
        json.loads(path.read_text())
    for path in address.home.rglob("*.toml"):
        assert address.base_url in str(tomllib.loads(path.read_text()))
    variables = environment(agent, address, scratch_home=True)
    assert variables["OPENAI_BASE_URL"] == "http://127.0.0.1:8100/sessions/s1/v1"
    assert variables["ANTHROPIC_BASE_URL"] == variables["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:8100/sessions/s1"
    assert variables["HOME"] == str(address.home)


def test_an_agents_default_flags_precede_the_users_flags(address):
    assert command_line(AGENTS["pi"], ["pi", "-p", "hello"], address) == [
        *("pi", "--provider", "turnwise", "--model", "demo"),
        *("-p", "hello"),
    ]


def test_the_users_turnwise_settings_are_not_passed_to_the_agent(address, monkeypatch):
    monkeypatch.setenv("TURNWISE_RUN_API_KEY", "secret")
    assert "TURNWISE_RUN_API_KEY" not in environment(AGENTS["any"], address, scratch_home=False)


METRICS = {"num_uniform_groups": 2}


class Policies:
    """Stands for a client; it has only versions, the newest first, each of which had two groups of equal rewards."""

    def __init__(self, num_refills: int) -> None:
        self.version = 7
        self._metrics = METRICS | {"num_refill_groups": num_refills}

    async def key_policy(self) -> str:
        return "support"

    async def policies(self, policy: str) -> AsyncIterator[dict[str, object]]:
        assert policy == "support"
        for version in range(self.version, 5, -1):
            status = "active" if version == self.version else "retired"
            yield {"version": version, "status": status, "metrics": self._metrics}


@pytest.mark.parametrize(("num_refills", "expected"), [(0, 6 + 3 * 3 + 1), (2, 6 + 3 * 5 + 1)])
async def test_groups_wait_until_the_trainer_has_used_earlier_ones(num_refills, expected):
    """3 groups a version and a lead of 2: 6 groups are admitted at once, 3 more with each of 3 versions.

    7 groups with equal rewards make room for 7 others, until the versions have used 3 · 2 of them. A trainer that took
    2 others in their place used 5 groups for each version.
    """
    policies, stopping = Policies(num_refills), asyncio.Event()
    pace = Pace(policies, groups_per_version=3, lead=2.0)
    admitted = 0

    async def admit_all() -> None:
        nonlocal admitted
        while not stopping.is_set():
            await pace.admit(stopping)
            admitted += not stopping.is_set()

    async def admits(expected: int) -> bool:
        for _ in range(60_000):
            if admitted >= expected:
                break
            await asyncio.sleep(0.01)
        return admitted == expected

    admitting = asyncio.create_task(admit_all())
    assert await admits(6)
    for _ in range(7):
        pace.note_uniform_group()
    assert await admits(6 + 7), "batches that teach nothing make no version"
    policies.version = 10
    assert await admits(expected)
    stopping.set()
    await admitting
    assert admitted == expected


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


def test_an_interpreters_script_is_found_from_the_current_directory_unless_the_working_directory_has_it(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").touch()
    work = tmp_path / "work"
    work.mkdir()
    assert with_script(["/usr/bin/python3.11", "agent.py", "x"], None) == [
        "/usr/bin/python3.11",
        str(tmp_path / "agent.py"),
        "x",
    ]
    assert with_script(["python", "agent.py"], work) == ["python", str(tmp_path / "agent.py")]
    (work / "agent.py").touch()
    assert with_script(["python", "agent.py"], work) == ["python", "agent.py"]


def test_other_arguments_mean_the_runs_own_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "answer.txt").touch()
    for command in (["cat", "answer.txt"], ["python", "-c", "answer.txt"], ["python", "missing.py"], ["python"]):
        assert with_script(command, None) == command


def test_a_grader_s_files_are_the_template_s_after_the_agent_has_changed_its_copies(tmp_path):
    """The script runs from the template; a directory of tests is put back, without what the agent added to it."""
    template, work = tmp_path / "template", tmp_path / "work"
    (template / "hidden").mkdir(parents=True)
    (template / "grade.py").write_text("honest")
    (template / "hidden" / "test_a.py").write_text("assert 0")
    assert with_script(["python", "grade.py"], template, of_template=True) == ["python", str(template / "grade.py")]
    (work / "hidden").mkdir(parents=True)
    (work / "hidden" / "test_a.py").write_text("assert 1")
    (work / "hidden" / "conftest.py").write_text("everything passes")
    (work / "answer.txt").write_text("42")
    restore_named(["-q", "hidden", "answer.txt", "", ".", "/etc/hostname", "../work"], template, work)
    assert {path.name: path.read_text() for path in (work / "hidden").iterdir()} == {"test_a.py": "assert 0"}
    assert (work / "answer.txt").read_text() == "42"


def test_a_grader_s_file_is_not_written_through_a_link_of_the_agent(tmp_path):
    template, work, elsewhere = tmp_path / "template", tmp_path / "work", tmp_path / "elsewhere"
    for directory in (template / "tests", work, elsewhere):
        directory.mkdir(parents=True)
    (template / "tests" / "a.py").write_text("a")
    (work / "tests").symlink_to(elsewhere)
    with pytest.raises(GraderFailed, match="behind a link"):
        restore_named(["tests/a.py"], template, work)
    restore_named(["tests"], template, work)
    assert (work / "tests" / "a.py").read_text() == "a"
    assert list(elsewhere.iterdir()) == []
