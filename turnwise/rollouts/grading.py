"""Rewards a played run and ends its session, exactly once, also after a kill."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

from turnwise.client import AsyncClient
from turnwise.errors import Conflict, GraderFailed, InvalidRequest, NotFound, TooLarge
from turnwise.files import write_whole
from turnwise.processes.limited import split_command, with_script
from turnwise.rewards.grader import CommandGrader, Grade, document
from turnwise.rewards.posting import post_once
from turnwise.rollouts import agents
from turnwise.rollouts.agents import AGENTS
from turnwise.rollouts.players import AgentEnd, PlannedRun
from turnwise.rollouts.settings import RunSettings
from turnwise.types import Json

PLAYED_FILE = "played.json"
"""Written when the agent of a run has ended; after that, a restart only grades the run."""
SOURCE = "turnwise run"


class Grading:
    """Grades runs by the reward command, or by what the called function returned."""

    def __init__(self, settings: RunSettings, client: AsyncClient) -> None:
        """Prepare the grader.

        Raises:
            SettingsError: there is no such program.
        """
        self._client = client
        self._grader: CommandGrader | None = None
        if settings.reward_command is not None:
            argv = with_script(split_command(settings.reward_command, "--reward-command"), settings.workdir)
            self._grader = CommandGrader(argv, settings.reward_timeout)

    def stored(self, directory: Path) -> AgentEnd | None:
        """Return the stored end of a run; None if the agent did not end."""
        path = directory / PLAYED_FILE
        if not path.exists():
            return None
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["rewards"] is not None:
            fields["rewards"] = [Grade(**each) for each in fields["rewards"]]
        return AgentEnd(**fields)

    def store(self, directory: Path, played: AgentEnd) -> None:
        write_whole(directory / PLAYED_FILE, json.dumps(dataclasses.asdict(played), ensure_ascii=False))

    async def grade(self, run: PlannedRun, played: AgentEnd) -> tuple[Json, str | None]:
        error = None
        rewards: Sequence[Grade] = played.rewards or []
        if self._grader is not None and played.error is None:
            try:
                rewards = [*rewards, *await self._ask(self._grader, run, played)]
            except GraderFailed as failure:
                error = f"the grader failed: {failure}"
        try:
            return await self._reward_and_end(run.session_id, rewards, played.termination_reason), error
        except (Conflict, InvalidRequest, NotFound, TooLarge) as failure:
            # A turn that the grader made up, or a name that the proxy refuses: the session stays without a reward.
            error = f"the proxy does not take the reward: {failure}"
            return await self._client.end_session(run.session_id, reason=played.termination_reason), error

    async def _reward_and_end(self, session_id: str, rewards: Sequence[Grade], reason: str) -> Json:
        """Post all rewards and end the session; a single session reward goes with the end in one transaction."""
        if len(rewards) == 1 and rewards[0] == Grade(rewards[0].value):
            return await self._client.end_session(session_id, reason=reason, reward=rewards[0].value)
        if rewards:
            lines = [reward.line(session_id, SOURCE) for reward in rewards]
            await post_once(self._client, session_id, lines, f"{session_id}/rewards")
        return await self._client.end_session(session_id, reason=reason)

    async def _ask(self, grader: CommandGrader, run: PlannedRun, played: AgentEnd) -> list[Grade]:
        session = await self._client.session(run.session_id)
        if session.get("train") is False:
            return []  # what is not to be trained is not judged either
        turns = [turn async for turn in self._client.turns(run.session_id)]
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("TURNWISE_")},
            **agents.variables(AGENTS["any"], run.address),
            **run.variables(),
            "TURNWISE_TERMINATION_REASON": played.termination_reason,
            "TURNWISE_LOG": str(run.log.absolute()),
        }
        return await grader.grade(
            document(session, turns, run.task.fields),
            cwd=run.workdir,
            environment=environment,
            log=run.directory / "grader.log",
        )
