"""Plays one run: as a command with its own process tree, or as a call in a warm worker."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from turnwise.processes.limited import run_limited
from turnwise.rewards.grader import Grade
from turnwise.rollouts import agents
from turnwise.rollouts.agents import Address, Agent
from turnwise.rollouts.tasks import Task, fill


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of one task, ready to be played."""

    task: Task
    run: int
    split: str
    session_id: str
    directory: Path
    workdir: Path
    address: Address

    def variables(self) -> dict[str, str]:
        return {
            **self.task.variables(),
            "TURNWISE_SESSION_ID": self.session_id,
            "TURNWISE_RUN": str(self.run),
            "TURNWISE_SPLIT": self.split,
            "TURNWISE_WORKDIR": str(self.workdir),
        }

    @property
    def log(self) -> Path:
        return self.directory / "agent.log"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentEnd:
    """How a run ended."""

    termination_reason: str
    seconds: float
    rewards: Sequence[Grade] | None = None
    """Rewards that the called function returned; None for a command."""
    error: str | None = None


class Player(Protocol):
    """Plays runs."""

    async def start(self) -> None:
        """Acquire what the first run needs.

        Raises:
            SettingsError: the agent cannot be used.
        """

    async def play(self, run: PlannedRun) -> AgentEnd: ...

    async def close(self) -> None: ...


class CommandPlayer:
    """Starts the agent's command for each run."""

    def __init__(self, agent: Agent, argv: Sequence[str], *, timeout_seconds: float, scratch_home: bool) -> None:
        self._agent = agent
        self._argv = argv
        self._timeout_seconds = timeout_seconds
        self._scratch_home = scratch_home

    async def play(self, run: PlannedRun) -> AgentEnd:
        await asyncio.to_thread(agents.write_files, self._agent, run.address)
        address = run.address
        values = {
            "task_id": run.task.task_id,
            "model": address.model,
            "base_url": address.base_url,
            "api_key": address.api_key,
            **run.task.fields,
        }
        argv = [self._argv[0], *(fill(argument, values) for argument in self._argv[1:])]
        environment = agents.environment(self._agent, address, scratch_home=self._scratch_home)
        ended = await run_limited(
            agents.command_line(self._agent, argv, address),
            cwd=run.workdir,
            environment={**environment, **run.variables()},
            log=run.log,
            timeout_seconds=self._timeout_seconds,
        )
        reason = "timeout" if ended.timed_out else f"exit_status_{ended.exit_status}"
        return AgentEnd(termination_reason=reason, seconds=ended.seconds)

    async def start(self) -> None: ...

    async def close(self) -> None: ...
