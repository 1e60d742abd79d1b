"""The trail as files: one file per person in a directory, which the agent reads by `cat NAME` in a real shell.

The task and its rewards are those of `trail`; the agent is another one. The prompts have the format of mini-swe-agent's
text mode, with one bash block per reply. An episode ends when the agent prints its submission.

The module also generates the warm-up conversations. Their player knows the format but not the task.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from turnwise.demo import trail

SYSTEM_PROMPT = "Reply with one block: ```mswea_bash_command, a command, ```."
"""The format in one line; the warm-up teaches it."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo "
"""The command that ends an episode for mini-swe-agent; the next line of the output is the submission."""

TOOLS: list[dict[str, Any]] | None = None
"""The format has no tools: commands are text."""


def question(task: trail.TrailTask) -> str:
    """Return the question for the agent."""
    return f"{task.question} Each person is a file. End with {SUBMIT}CITY"


def for_agent(task: trail.TrailTask) -> dict[str, Any]:
    """Return a task as a line of a tasks file. The agent sends only the question to the model."""
    return {
        "task_id": task.task_id,
        "question": question(task),
        "files": {name: card(record) for name, record in task.records.items()},
        "step_limit": task.num_hops + 2,
        "answer": task.answer,
    }


def card(record: Mapping[str, str]) -> str:
    """Return the content of a person's file."""
    return "".join(f"{field} {value}\n" for field, value in record.items())


def write_files(files: Mapping[str, str], directory: Path) -> None:
    """Write one file per person."""
    for name, content in files.items():
        (directory / name).write_text(content, encoding="utf-8")


def warm_up_conversation(task: trail.TrailTask, rng: random.Random) -> list[trail.Message]:
    """Return a conversation of a player that knows the format but not the task, as in `trail`."""
    messages: list[trail.Message] = [
        {"role": "system", "content": SYSTEM_PROMPT},
        {"role": "user", "content": question(task)},
    ]
    name = trail.first_person(task)
    for _ in range(trail.MAX_HOPS + 1):
        messages += [_block(f"cat {name}"), _observation(task, name)]
        if name not in task.records:
            return [*messages, {"role": "assistant", "content": trail.GIVING_UP}]
        record = task.records[name]
        name = rng.choice(list(record.values()))
        if rng.random() < trail.warm_up_answer_rate(record):
            return [*messages, _block(SUBMIT + name)]
    return messages


def _block(command: str) -> trail.Message:
    return {"role": "assistant", "content": f"```mswea_bash_command\n{command}\n```"}


def _observation(task: trail.TrailTask, name: str) -> trail.Message:
    """Return mini-swe-agent's message after `cat NAME`."""
    if name in task.records:
        status, output = 0, card(task.records[name])
    else:
        status, output = 1, f"cat: {name}: No such file or directory\n"
    return {"role": "user", "content": f"<returncode>{status}</returncode>\n<output>\n{output}</output>"}
