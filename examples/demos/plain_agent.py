"""Lets `turnwise run --call` play an agent that does not use Turnwise; a control gives rewards of other sessions.

The agent is a file with `async def play(client, task, model)`. It gets a plain OpenAI client. A line of the tasks file
names the module that makes the task, by `make_task(split, index, seed)`, and grades the reply, by `reward(task, text)`.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import importlib.util
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

from turnwise.errors import SettingsError
from turnwise.types import Json

if TYPE_CHECKING:
    from openai import AsyncOpenAI

    from turnwise.rollouts.worker import Run

Split = Literal["train", "eval"]
Play = Callable[[Any, Json, str], Awaitable[str]]
MAX_RETRIES = 8
NUM_SHUFFLED = 64
"""Rewards among which a control exchanges."""


def task_line(agent: str, tasks: str, split: Split, index: int, seed: int, options: Json) -> Json:
    named = {"agent": agent, "tasks": tasks, "split": split, "index": index, "seed": seed, "options": options}
    return {"task_id": f"{split}-{seed}-{index}", **named}


async def play(line: Json, run: Run) -> float | None:
    """Play the task that a line names; return its reward, None where others are to rate the session."""
    tasks = importlib.import_module(line["tasks"])
    task = tasks.make_task(line["split"], line["index"], line["seed"], **line["options"])
    client = _client().with_options(base_url=run.base_url, api_key=run.api_key)
    final_text = await load_agent(line["agent"])(client, task.for_agent(), run.model)
    if line.get("unrated"):
        return None
    reward = await asyncio.to_thread(tasks.reward, task, final_text)  # a grader may run a program
    return _shuffled(line["seed"]).exchange(reward) if line.get("shuffled") else reward


class ShuffledRewards:
    """Gives each training session the reward of another one: a control that has nothing to learn.

    Rewards keep their mean and their spread.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)  # noqa: S311 - a control of an experiment, no secret
        self._held: list[float] = []

    def exchange(self, reward: float) -> float:
        """Keep a reward, and return one of the latest ones; so few at the beginning that some are given twice."""
        self._held.append(reward)
        if len(self._held) <= NUM_SHUFFLED:
            return self._random.choice(self._held)
        return self._held.pop(self._random.randrange(len(self._held)))


@functools.cache
def _shuffled(seed: int) -> ShuffledRewards:
    return ShuffledRewards(seed)


@functools.cache
def load_module(path: str) -> ModuleType:
    """Return the module of an agent's file.

    Raises:
        SettingsError: the file does not exist, or has no `play`.
    """
    spec = importlib.util.spec_from_file_location("agent", path)
    if spec is None or spec.loader is None or not Path(path).is_file():
        raise SettingsError(
            f"there is no agent at {path!r}; give a Python file with `async def play(client, task, model)`"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not hasattr(module, "play"):
        raise SettingsError(f"{path!r} has no `async def play(client, task, model)`")
    return module


def load_agent(path: str) -> Play:
    return cast("Play", load_module(path).play)


@functools.cache
def _client() -> AsyncOpenAI:
    """Return the client whose connections all runs share."""
    import openai

    return openai.AsyncOpenAI(base_url="http://127.0.0.1:8100/v1", api_key="none", max_retries=MAX_RETRIES)
