"""The reward source `command`: any program that reads a session as JSON and answers with rewards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from turnwise.errors import GraderFailed
from turnwise.processes.limited import run_limited
from turnwise.rewards.verdict import Reward, read_verdict
from turnwise.types import Json


@dataclass(frozen=True, slots=True)
class CommandGrader:
    """Runs one command for each graded session."""

    argv: Sequence[str]
    timeout_seconds: float = 60.0

    async def grade(self, document: Json, *, cwd: Path, environment: Mapping[str, str], log: Path) -> list[Reward]:
        """Return the rewards of one session.

        Args:
            document: What the command reads on standard input, as JSON.
            cwd: Its working directory.
            environment: All of its environment.
            log: Where its standard error goes.

        Raises:
            GraderFailed: it gave no usable reward, or not within the time limit.
        """
        ended = await run_limited(
            self.argv,
            cwd=cwd,
            environment=environment,
            log=log,
            timeout_seconds=self.timeout_seconds,
            stdin=json.dumps(document, ensure_ascii=False).encode(),
            capture=True,
        )
        if ended.timed_out:
            raise GraderFailed(f"{self.argv[0]!r} did not end within {self.timeout_seconds:g} s; its log is {log}")
        try:
            return read_verdict(ended.output, ended.exit_status)
        except GraderFailed as error:
            raise GraderFailed(f"{self.argv[0]!r} gave no reward: {error}; its log is {log}") from error
