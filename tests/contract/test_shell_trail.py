from __future__ import annotations

import random
import re
import subprocess

from turnwise.default_models import trail

SHELL = trail.FORMATS["shell_trail"]
BLOCK = re.compile(r"```mswea_bash_command\s*\n(.*?)\n```", re.DOTALL)
"""How mini-swe-agent's text mode finds the command of a reply."""
NUM_TASKS = 20


def conversations():
    for index in range(NUM_TASKS):
        task = trail.make_task("warm_up", index, 0)
        yield task, SHELL.warm_up_conversation(task, random.Random(index))


def test_the_warm_up_outputs_equal_those_of_a_real_shell(tmp_path):
    """Each command of a conversation, run in the task's directory, gives the message that follows it."""
    num_run = 0
    for task, messages in conversations():
        directory = tmp_path / task.task_id
        directory.mkdir()
        for name, content in SHELL.for_agent(task)["files"].items():
            (directory / name).write_text(content, encoding="utf-8")
        for reply, output in zip(messages[2::2], messages[3::2], strict=False):
            (command,) = BLOCK.findall(reply["content"])
            ran = subprocess.run(
                command,
                shell=True,
                cwd=directory,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert output["content"] == f"<returncode>{ran.returncode}</returncode>\n<output>\n{ran.stdout}</output>"
            num_run += 1
    assert num_run > NUM_TASKS


def test_the_commands_that_follow_each_boss_reach_the_answer_within_the_step_limit(tmp_path):
    for index in range(NUM_TASKS):
        task = trail.make_task("eval", index, 0)
        shown_task = SHELL.for_agent(task)
        name, steps = trail.first_person(task), 0
        while name in shown_task["files"]:
            name = shown_task["files"][name].split()[1]
            steps += 1
        assert name == shown_task["answer"]
        assert steps + 1 <= shown_task["step_limit"], "the submission is a separate step"
        assert shown_task["answer"] not in shown_task["question"]
