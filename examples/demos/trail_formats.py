"""The trail in the forms in which other agents meet it. Questions, answers and rewards are the same.

pydantic-ai generates the schema of its tool. mini-swe-agent reads one file per person in a real shell, in its text
mode.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from turnwise.default_models.trail import (
    GIVING_UP,
    MAX_HOPS,
    Message,
    Record,
    TrailTask,
    WarmUp,
    first_person,
    warm_up_answer_rate,
    warm_up_conversation,
)

TYPED_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a person up.",
            "parameters": {
                "additionalProperties": False,
                "properties": {"name": {"type": "string"}},
                "required": ["name"],
                "type": "object",
            },
        },
    }
]
"""The same tool with the schema that pydantic-ai generates; the model reads it in every system prompt."""

SHELL_SYSTEM_PROMPT = "Reply with one block: ```mswea_bash_command, a command, ```."
"""The format in one line; the warm-up teaches it."""

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo "
"""The command that ends an episode for mini-swe-agent; the next line of the output is the submission."""


def _line_with_answer(task: TrailTask) -> dict[str, Any]:
    return {**task.for_agent(), "answer": task.answer}


def _shell_question(task: TrailTask) -> str:
    return f"{task.question} Each person is a file. End with {SUBMIT}CITY"


def _line_with_files(task: TrailTask) -> dict[str, Any]:
    """Return a line of a tasks file, of which the agent sends only the question to the model."""
    return {
        "task_id": task.task_id,
        "question": _shell_question(task),
        "files": {name: _file_content(record) for name, record in task.records.items()},
        "step_limit": task.num_hops + 2,
        "answer": task.answer,
    }


def _file_content(record: Record) -> str:
    return "".join(f"{field} {value}\n" for field, value in record.items())


def _shell_conversation(task: TrailTask, rng: random.Random) -> list[Message]:
    """Return the conversation of `warm_up_conversation`'s player in a shell, where it reads a person by `cat NAME`."""
    messages: list[Message] = [
        {"role": "system", "content": SHELL_SYSTEM_PROMPT},
        {"role": "user", "content": _shell_question(task)},
    ]
    name = first_person(task)
    for _ in range(MAX_HOPS + 1):
        messages += [_shell_block(f"cat {name}"), _shell_output(task, name)]
        if name not in task.records:
            return [*messages, {"role": "assistant", "content": GIVING_UP}]
        record = task.records[name]
        name = rng.choice(list(record.values()))
        if rng.random() < warm_up_answer_rate(record):
            return [*messages, _shell_block(SUBMIT + name)]
    return messages


def _shell_block(command: str) -> Message:
    return {"role": "assistant", "content": f"```mswea_bash_command\n{command}\n```"}


def _shell_output(task: TrailTask, name: str) -> Message:
    """Return mini-swe-agent's message after `cat NAME`."""
    if name in task.records:
        status, output = 0, _file_content(task.records[name])
    else:
        status, output = 1, f"cat: {name}: No such file or directory\n"
    return {"role": "user", "content": f"<returncode>{status}</returncode>\n<output>\n{output}</output>"}


@dataclass(frozen=True)
class TrailFormat:
    """A form of the task."""

    for_agent: Callable[[TrailTask], dict[str, Any]]
    """Returns a line of a tasks file."""
    warm_up: WarmUp


FORMATS = {
    "typed_trail": TrailFormat(_line_with_answer, WarmUp("typed_trail", warm_up_conversation, TYPED_TOOLS)),
    "shell_trail": TrailFormat(_line_with_files, WarmUp("shell_trail", _shell_conversation, None)),
}
