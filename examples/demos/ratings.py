"""`python -m examples.demos.ratings`: of two hundred and forty sessions forty are rated, and a pretrained model learns.

Sessions get no reward. After each round ten of its sessions are drawn by `GET /v1/ratings/next`, and rated by the
task's own grader, and the trainer makes a version. `--shuffled` gives each of the ten the rating of another one: there
is nothing to learn.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from examples.bosses import tasks as bosses
from examples.demos.driver import demo_command
from examples.demos.plain_agent import Split
from examples.demos.real import MOST_RISE, RealDemo, RealDemoSettings
from examples.demos.report import Report
from turnwise.client import AsyncClient
from turnwise.processes.supervisor import Supervisor
from turnwise.processes.terminal import Say
from turnwise.rollouts.results import RunResult
from turnwise.rollouts.runner import POLL_SECONDS
from turnwise.types import Json

RATED = 10
"""Ratings that make a version, as the setting `ratings` has it."""


class RatingsDemoSettings(RealDemoSettings):
    """Settings of `make demo-ratings`."""

    trainer_config: Path = Path("examples/bosses/ratings.toml")
    out: Path = Path("runs/demo-ratings")
    single_sessions: bool = True
    enough_reward: float = Field(default=0.85, gt=0, le=1)
    max_versions: int = Field(default=4, ge=1)
    """Rounds; each makes a version."""
    round_sessions: int = Field(default=60, ge=RATED)
    """Sessions of a round, of which ten are rated."""
    lead: float = Field(default=1.0, ge=1)
    shuffled: bool = False
    """Give each rated session the rating of another one."""

    def missed(self, report: Report) -> str | None:
        if not self.shuffled:
            return super().missed(report)
        most = report.reward_before + MOST_RISE
        return None if report.reward_after <= most else f"shuffled ratings reach at most {most:.2f}"


class RatingsDemo(RealDemo):
    """The demo in which few sessions are rated."""

    title = "SmolLM2-135M-Instruct learns from forty ratings"
    _settings: RatingsDemoSettings

    def __init__(self, settings: RatingsDemoSettings, say: Say) -> None:
        super().__init__(settings, say)
        self._ratings: list[float] = []
        self._client: AsyncClient | None = None

    def task(self, split: Split, index: int, options: Mapping[str, Any]) -> Json:
        return super().task(split, index, options) | {"unrated": split == "train"}

    def _groups_per_version(self) -> int:
        return self._settings.round_sessions

    def _latest_reward(self, played: Sequence[RunResult]) -> float:  # noqa: ARG002
        """Return the mean of the newest ratings; sessions have no other reward."""
        newest = self._ratings[-RATED:]
        return sum(newest) / max(len(newest), 1)

    async def _learnt_since(self, version: int) -> None:  # noqa: ARG002
        """Wait for the version of the last round."""
        while True:
            if self._version >= self._settings.max_versions:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _learn_one(self, client: AsyncClient, up: Supervisor) -> Report:
        self._client = client
        return await super()._learn_one(client, up)

    async def _train(self) -> None:
        async with asyncio.TaskGroup() as both:
            both.create_task(super()._train())
            both.create_task(self._rate())

    async def _rate(self) -> None:
        """Rate ten sessions of each round once all of it is played."""
        settings = self._settings
        for number in range(1, settings.max_versions + 1):
            await self._all_played(number * settings.round_sessions)
            drawn = [await self._drawn() for _ in range(RATED)]
            rewards = [reward for _, reward in drawn]
            if settings.shuffled:
                random.Random(number).shuffle(rewards)  # noqa: S311 - a control of an experiment, no secret
            for (session_id, _), reward in zip(drawn, rewards, strict=True):
                await self._connected().rate(session_id, reward)
            self._ratings += rewards
            self._say("rate", f"{len(self._ratings)} of {len(self._played())} sessions are rated, these ten {rewards}")

    async def _all_played(self, num_sessions: int) -> None:
        while True:
            if len(self._played()) >= num_sessions:
                return
            await asyncio.sleep(POLL_SECONDS)

    async def _drawn(self) -> tuple[str, float]:
        """Return a session that is drawn for a rater of its own, and what its last reply is worth."""
        client = self._connected()
        draw = await client.next_rating(rater=f"rater {len(self._ratings)} {random.random()}")  # noqa: S311
        session = await client.session(draw["session_id"])
        turns = [turn async for turn in client.turns(draw["session_id"])]
        task = bosses.make_task("train", int(session["task_id"].rpartition("-")[2]), self._settings.seed)
        return draw["session_id"], bosses.reward(task, str((turns[-1]["response"] or {}).get("content") or ""))

    def _connected(self) -> AsyncClient:
        assert self._client is not None, "sessions are rated while the stack is up"  # noqa: S101
        return self._client


command = demo_command(
    "demo-ratings",
    RatingsDemoSettings,
    RatingsDemo,
    "Let a pretrained model learn from forty ratings.",
)

if __name__ == "__main__":
    command()
