"""Plays sessions with an agent that does not use Turnwise, and posts their rewards over HTTP.

The agent is a file with `async def play(client, task, model)`, loaded as a script. It gets a plain OpenAI client. This
module creates the sessions and posts the rewards, as any harness would do over HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import logging
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, cast

from turnwise.client import AsyncClient
from turnwise.client.wire import SessionFields
from turnwise.errors import SettingsError, TurnwiseError
from turnwise.types import Json

log = logging.getLogger(__name__)

Play = Callable[[Any, dict[str, Any], str], Awaitable[str]]
MAX_FAILED_SESSIONS = 5
"""Number of failed sessions after which the demo ends with the last session's error."""
CONCURRENT_SESSIONS = 64
"""More concurrent sessions do not increase the small engine's load."""
NUM_SHUFFLED = 64
"""Rewards among which a control exchanges."""


def load_module(path: Path) -> ModuleType:
    """Return the module of an agent's file.

    Raises:
        SettingsError: the file does not exist.
    """
    spec = importlib.util.spec_from_file_location("agent", path)
    if spec is None or spec.loader is None or not path.is_file():
        raise SettingsError(
            f"there is no agent at {str(path)!r}; give a Python file with `async def play(client, task, model)`"
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def load_agent(path: Path) -> Play:
    """Return the agent's `play`.

    Raises:
        SettingsError: the file does not exist, or has no such function.
    """
    module = load_module(path)
    if not hasattr(module, "play"):
        raise SettingsError(f"{str(path)!r} has no `async def play(client, task, model)`")
    return cast("Play", module.play)


@dataclasses.dataclass(slots=True)
class Tally:
    """Counts of the sessions that have been played."""

    num_sessions: int = 0
    """Training sessions."""
    num_failed: int = 0
    """Sessions in which a request failed; the demo expects none."""
    recent_rewards: list[float] = dataclasses.field(default_factory=list)
    """Rewards of the latest training sessions."""

    def mean_reward(self, num_sessions: int) -> float:
        """Return the mean over the latest training sessions."""
        latest = self.recent_rewards[-num_sessions:]
        return sum(latest) / len(latest) if latest else 0.0


class DemoTask(Protocol):
    """A task of a demo."""

    @property
    def task_id(self) -> str:
        """Its name."""

    def for_agent(self) -> dict[str, Any]:
        """Return the task as JSON for an agent, without the answer."""


class Tasks(Protocol):
    """A module that makes tasks and grades answers, such as `trail`."""

    def make_task(self, split: Literal["train", "eval"], index: int, seed: int, /) -> Any:
        """Return a task; the same arguments give the same `DemoTask`."""

    def reward(self, task: Any, final_text: str, /) -> float:
        """Return the reward of the agent's last reply."""


class Playing(Protocol):
    """Interface of an object that plays the demo's agent."""

    tally: Tally
    is_training: bool
    """False skips the training sessions that have not begun; running sessions are completed."""

    async def evaluate(self, first: int, count: int) -> float:
        """Play each of some held-out tasks once, without training on them; return their mean reward."""

    async def train_group(self, index: int, size: int) -> None:
        """Play one training task `size` times as one group."""

    async def train_singles(self, index: int, size: int) -> None:
        """Play `size` training tasks once each, in sessions without a group."""


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


class Rollouts:
    """Plays sessions through the proxy."""

    def __init__(
        self,
        client: AsyncClient,
        play: Play,
        model: str,
        *,
        tasks: Tasks,
        seed: int,
        num_parallel: int,
        shuffled: ShuffledRewards | None = None,
    ) -> None:
        self._client = client
        self._play = play
        self._model = model
        self._tasks = tasks
        self._seed = seed
        self._places = asyncio.Semaphore(num_parallel)
        self._shuffled = shuffled
        self.tally = Tally()
        self.is_training = True
        """False skips the training sessions that have not begun; running sessions are completed."""

    async def evaluate(self, first: int, count: int, sampling: Json | None = None) -> float:
        """Play each of some held-out tasks once, without training on them; return their mean reward.

        `sampling` overrides the sampling parameters of the agent's calls.
        """
        played = [self._session("eval", first + index, 0, None, sampling) for index in range(count)]
        return sum(await asyncio.gather(*played)) / count

    async def train_group(self, index: int, size: int) -> None:
        """Play one training task `size` times as one group."""
        rewards = await asyncio.gather(*(self._session("train", index, run, size) for run in range(size)))
        if self.is_training:
            self.tally.recent_rewards += rewards

    async def train_singles(self, index: int, size: int) -> None:
        """Play `size` training tasks once each, in sessions without a group."""
        tasks = range(index * size, (index + 1) * size)
        rewards = await asyncio.gather(*(self._session("train", task, 0, None) for task in tasks))
        if self.is_training:
            self.tally.recent_rewards += rewards

    async def _session(
        self,
        split: Literal["train", "eval"],
        index: int,
        run: int,
        group_size: int | None,
        sampling: Json | None = None,
    ) -> float:
        task: DemoTask = self._tasks.make_task(split, index, self._seed)
        fields = SessionFields(task_id=task.task_id, run=run, split=split, sampling=sampling or {})
        if group_size is not None:
            fields |= SessionFields(group_id=task.task_id, group_size=group_size)
        async with self._places:
            if split == "train" and not self.is_training:
                return 0.0
            session = await self._client.create_session(**fields)
            try:
                answer = await self._play(session.openai_async(), task.for_agent(), self._model)
            except Exception as error:  # the agent is third-party code; a failure is counted and gets the reward 0
                self.tally.num_failed += 1
                if self.tally.num_failed >= MAX_FAILED_SESSIONS:
                    raise TurnwiseError(f"{MAX_FAILED_SESSIONS} sessions failed, the last with {error!r}") from error
                log.exception("a session failed")
                answer = ""
            reward = self._tasks.reward(task, answer)
            given = reward
            if self._shuffled is not None and split == "train":
                given = self._shuffled.exchange(reward)
            await session.reward(given, source="demo")
            await session.end(reason="env_done")
        self.tally.num_sessions += split == "train"
        return reward
