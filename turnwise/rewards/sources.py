"""The reward sources: each turns sessions, as JSON documents, into rewards."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from turnwise.errors import GraderFailed
from turnwise.processes.limited import call_in_daemon_thread, split_command
from turnwise.rewards.grader import CommandGrader, Grade, as_rewards
from turnwise.rewards.judge import Judge
from turnwise.rewards.settings import RewardSettings
from turnwise.settings import load_object
from turnwise.types import Json


class Source(Protocol):
    """Decides on the sessions of one unit: a single session, or all sessions of a group."""

    async def decide(self, documents: Sequence[Json]) -> list[Grade]:
        """Return the rewards; those of a group name their sessions.

        Raises:
            GraderFailed: no verdict can be used.
        """

    async def close(self) -> None: ...


class CommandSource:
    """Any program."""

    def __init__(self, settings: RewardSettings) -> None:
        assert settings.command is not None
        self._grader = CommandGrader(split_command(settings.command, "--command"), settings.timeout)
        self._workdir = settings.workdir
        self._log = settings.state_path().with_suffix(".log")

    async def decide(self, documents: Sequence[Json]) -> list[Grade]:
        (document,) = documents
        environment = {**os.environ, "TURNWISE_SESSION_ID": document["session"]["session_id"]}
        return await self._grader.grade(document, cwd=self._workdir, environment=environment, log=self._log)

    async def close(self) -> None: ...


class PythonSource:
    """A function by its import path."""

    def __init__(self, settings: RewardSettings) -> None:
        assert settings.function is not None
        self._function = load_function(settings.function)
        self._name = settings.function

    async def decide(self, documents: Sequence[Json]) -> list[Grade]:
        (document,) = documents
        value = await _in_daemon_thread(self._name, self._function, document)
        try:
            if inspect.isawaitable(value):
                value = await value
        except (Exception, SystemExit) as error:  # the function is anybody's code; the caller counts its failure
            raise _failure(self._name, error) from error
        return as_rewards(value)

    async def close(self) -> None: ...


def _failure(name: str, error: BaseException) -> GraderFailed:
    failure = GraderFailed(f"{name} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


async def _in_daemon_thread(name: str, function: Callable[[Json], Any], document: Json) -> Any:
    """Return what the function returns, without a wait for a hanging one at the process's end."""
    returned: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def finish(value: Any, error: BaseException | None) -> None:
        if returned.done():  # the time limit has passed
            return
        if error is None:
            returned.set_result(value)
        else:
            returned.set_exception(_failure(name, error))  # a future takes no StopIteration

    call_in_daemon_thread("grader", lambda: function(document), finish)
    return await returned


def make_source(settings: RewardSettings) -> Source:
    if settings.source == "command":
        return CommandSource(settings)
    if settings.source == "python":
        return PythonSource(settings)
    return Judge(settings)


def load_function(target: str) -> Callable[..., Any]:
    """Import `module:function`, also from the working directory."""
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    function: Callable[..., Any] = load_object(target, "function")
    return function
