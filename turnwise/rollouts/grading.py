"""Rewards a played run and ends its session, exactly once, also after a kill."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import shutil
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

SHOWN_FIELDS = ("value", "name", "step", "turn_id", "source", "written_by")
PLAYED_FILE = "played.json"
"""Written when the agent of a run has ended; after that, a restart only grades the run."""
SOURCE = "turnwise run"
FOREIGN_REWARDS = "foreign_rewards"
"""Termination reason of a session that somebody else has rewarded before its run was graded, such as its agent."""


def restore_named(arguments: Sequence[str], template: Path, workdir: Path) -> None:
    """Give a run's directory the template's files that a grading command names: the agent may have changed its copies.

    Raises:
        GraderFailed: the agent has made a link to elsewhere of a directory on the way.
    """
    for name in arguments:
        source, target = template / name, workdir / name
        if target == workdir or Path(name).is_absolute() or ".." in Path(name).parts or not source.exists():
            continue
        if target.parent.resolve() != (workdir.resolve() / name).parent:
            raise GraderFailed(
                f"{name!r} lies behind a link in {str(workdir)!r}, so the template's cannot be put there"
            )
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True)
        else:
            shutil.copy2(source, target)


class Grading:
    """Grades runs by the reward command, or by what the called function returned."""

    def __init__(self, settings: RunSettings, client: AsyncClient) -> None:
        """Prepare the grader.

        Raises:
            SettingsError: there is no such program.
        """
        self._client = client
        self._template = settings.workdir
        self._takes_returned = settings.call is not None
        self._grader: CommandGrader | None = None
        if settings.reward_command is not None:
            argv = split_command(settings.reward_command, "--reward-command")
            self._grader = CommandGrader(with_script(argv, settings.workdir, of_template=True), settings.reward_timeout)

    def stored(self, directory: Path) -> AgentEnd | None:
        """Return the stored end of a run; None if the agent did not end.

        A command returns no reward: one in this file is the agent's, which can write beside its working directory.
        """
        path = directory / PLAYED_FILE
        if not path.exists():
            return None
        fields = json.loads(path.read_text(encoding="utf-8"))
        if fields["rewards"] is not None:
            fields["rewards"] = [Grade(**each) for each in fields["rewards"]] if self._takes_returned else None
        return AgentEnd(**fields)

    def store(self, directory: Path, played: AgentEnd) -> None:
        write_whole(directory / PLAYED_FILE, json.dumps(dataclasses.asdict(played), ensure_ascii=False))

    async def grade(self, run: PlannedRun, played: AgentEnd, *, is_resumed: bool = False) -> tuple[Json, str | None]:
        """Reward and end a run's session; return its JSON, and what was wrong.

        A resumed run may have been rewarded before a kill.
        """
        error = None
        rewards: Sequence[Grade] = played.rewards or []
        if self._grader is not None and played.error is None:
            try:
                rewards = [*rewards, *await self._ask(self._grader, run, played)]
            except GraderFailed as failure:
                error = f"the grader failed: {failure}"
        if (line := await self._foreign_line(run.session_id, is_resumed=is_resumed)) is not None:
            return await self._refuse(run.session_id, line)
        try:
            return await self._reward_and_end(run.session_id, rewards, played.termination_reason), error
        except (Conflict, InvalidRequest, NotFound, TooLarge) as failure:
            # A turn that the grader made up, or a name that the proxy refuses: the session stays without a reward.
            error = f"the proxy does not take the reward: {failure}"
            return await self._client.end_session(run.session_id, reason=played.termination_reason), error

    async def _foreign_line(self, session_id: str, *, is_resumed: bool) -> Json | None:
        """Return a reward line that this command did not write; None without one."""
        session = await self._client.session(session_id)
        if session["reward"] is None:
            return None
        turns = [turn async for turn in self._client.turns(session_id)]
        lines = [*session["rewards"], *(line for turn in turns for line in turn["rewards"])]
        foreign = [line for line in lines if not (is_resumed and line["source"] == SOURCE)]
        return next(iter(foreign), None if lines else {"value": session["reward"]})

    async def _refuse(self, session_id: str, line: Json) -> tuple[Json, str]:
        await self._client.do_not_train(session_id)
        ended = await self._client.end_session(session_id, reason=FOREIGN_REWARDS)
        shown = {name: value for name, value in line.items() if name in SHOWN_FIELDS and value is not None}
        error = (
            f"its session has a reward that `turnwise run` did not write: {json.dumps(shown)}. It is not trained; what "
            "an agent can reach is in docs/rollouts.md"
        )
        return {**ended, "reward": None}, error

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
        if self._template is not None:
            await asyncio.to_thread(restore_named, grader.argv[1:], self._template, run.workdir)
        return await grader.grade(
            document(session, turns, run.task.fields),
            cwd=run.workdir,
            environment=environment,
            log=run.directory / "grader.log",
        )
