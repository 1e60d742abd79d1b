"""Plays runs of tasks, each in a session, and tells after a kill which is played anew, only graded, or finished.

Three records give the state of a run, in this order: its line in `results.jsonl` (finished), its session at the
proxy (ended: finished, the line is missing), and `played.json` in its directory (played, not yet rewarded). A session
that is open, has turns and has no `played.json` was interrupted: it is ended without a reward, and the run is played
anew in a session of the next attempt. Training groups wait until the trainer has used earlier ones, so that sessions
stay fresh.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.client import AsyncClient, AsyncSessionHandle
from turnwise.client.wire import SessionFields
from turnwise.errors import RolloutFailed, TurnwiseError
from turnwise.files import write_whole
from turnwise.processes.supervisor import tail_of
from turnwise.rollouts.agents import Address, Model
from turnwise.rollouts.grading import FOREIGN_REWARDS, Grading
from turnwise.rollouts.players import AgentEnd, PlannedRun, Player
from turnwise.rollouts.results import Key, Results, RunResult
from turnwise.rollouts.settings import RunSettings
from turnwise.rollouts.tasks import Task
from turnwise.types import DEFAULT_POLICY_NAME, Json

POLL_SECONDS = 0.25


class Pace:
    """Admits groups for at most `lead` versions more than the trainer has published.

    A group of equal rewards makes room for another one, because the trainer may learn nothing from it, until a version
    counts it as a part of its batch. So batches that teach nothing, from which no version comes, stop no rollouts.
    """

    def __init__(self, client: AsyncClient, *, groups_per_version: int, lead: float) -> None:
        self._client = client
        self._groups_per_version = groups_per_version
        self._lead = lead
        self._num_groups = 0
        self._num_uniform = 0
        """Groups of equal rewards that were played and are in no version's batch."""
        self._num_used = 0
        self._policy = DEFAULT_POLICY_NAME
        self._version: int | None = None
        self._polled_at = float("-inf")

    async def admit(self, stopping: asyncio.Event) -> None:
        """Wait until one more group may start, or until the runner stops."""
        if self._version is None:
            await self._poll()
        while not stopping.is_set():
            if self._num_groups < (self._num_used + self._lead * self._groups_per_version + max(0, self._num_uniform)):
                self._num_groups += 1
                return
            await self._poll()

    def note_uniform_group(self) -> None:
        self._num_uniform += 1

    async def _poll(self) -> None:
        await asyncio.sleep(max(0.0, self._polled_at + POLL_SECONDS - time.monotonic()))
        self._polled_at = time.monotonic()
        if self._version is None:
            self._policy = await self._client.key_policy()
        active = await active_policy(self._client, self._policy)
        if self._version is None:
            self._version = 0 if active is None else int(active["version"])
        if active is None or active["version"] <= self._version:
            return
        async for policy in self._client.policies(self._policy):
            if policy["version"] <= self._version:
                break
            if policy["version"] <= active["version"]:
                metrics = policy["metrics"] or {}
                self._num_used += self._groups_per_version + int(metrics.get("num_refill_groups", 0))
                self._num_uniform -= int(metrics.get("num_uniform_groups", 0))
        self._version = int(active["version"])


async def active_policy(client: AsyncClient, policy: str = DEFAULT_POLICY_NAME) -> Json | None:
    """Return a policy's active version as the API returns it; None while none was published."""
    async for version in client.policies(policy):
        if version["status"] == "active":
            return version
    return None


INTERRUPTED = "interrupted"
MAX_RUNS_WITHOUT_CALLS = 3

OnResult = Callable[[RunResult], None]


@dataclass(frozen=True, slots=True)
class _Planned:
    """A run before it has a session."""

    task: Task
    run: int
    group_size: int
    split: str
    pass_index: int

    @property
    def key(self) -> Key:
        return (self.pass_index, self.split, self.task.task_id, self.run)


class Runner:
    """Plays tasks, never more than `parallel` runs at a time."""

    def __init__(
        self,
        settings: RunSettings,
        client: AsyncClient,
        player: Player,
        results: Results,
        *,
        model: Model,
        pace: Pace | None = None,
        on_result: OnResult = lambda _: None,
    ) -> None:
        """Initialise the runner; None as `pace` delays no groups, and `on_result` is called with each finished run."""
        self._settings = settings
        self._client = client
        self._player = player
        self._results = results
        self._model = model
        self._pace = pace
        self._on_result = on_result
        self._grading = Grading(settings, client)
        self._places = asyncio.Semaphore(settings.parallel)
        self._num_finished = 0
        self._has_called = False
        self._without_calls: list[RunResult] = []
        self.stopping = asyncio.Event()

    async def play(
        self, tasks: Iterable[Task], *, split: str = "train", group_size: int = 1, pass_index: int = 0
    ) -> list[RunResult]:
        """Play each task `group_size` times; return all results, including those of an earlier start.

        Raises:
            RolloutFailed: the agent never calls the model.
            SettingsError: the agent cannot be started.
        """
        planned: list[_Planned] = []
        try:
            async with asyncio.TaskGroup() as running:
                for task in tasks:
                    group = [_Planned(task, run, group_size, split, pass_index) for run in range(group_size)]
                    planned += group
                    await self._start(group, running)
                    if self.stopping.is_set():
                        break
        except BaseExceptionGroup as failures:  # Python 3.11.2 puts what `except*` raises into a group again
            expected, others = failures.split((TurnwiseError, OSError))
            if expected is None or others is not None:
                raise
            raise _first(expected) from None
        finished = self._results.finished | {result.key: result for result in self._without_calls}
        return [finished[each.key] for each in planned if each.key in finished]

    def num_finished(self, pass_index: int, split: str) -> int:
        return sum(key[:2] == (pass_index, split) for key in self._results.finished)

    async def _start(self, group: list[_Planned], running: asyncio.TaskGroup) -> None:
        missing = [each for each in group if each.key not in self._results.finished]
        if missing and self._pace is not None and missing[0].split == "train":
            await self._pace.admit(self.stopping)
        for each in missing:
            await self._places.acquire()
            if self.stopping.is_set():
                self._places.release()
                return
            running.create_task(self._finish(each))

    async def _finish(self, planned: _Planned) -> None:
        try:
            result = await self._complete(planned)
        finally:
            self._places.release()
        self._on_result(result)
        self._num_finished += 1
        self._has_called = self._has_called or result.num_turns > 0
        if not self._has_called:
            self._without_calls.append(result)
            if self._num_finished >= MAX_RUNS_WITHOUT_CALLS:
                cause = no_call_cause(result, self._settings)
                raise RolloutFailed(f"the first {self._num_finished} runs made no model call {cause}")
            return
        self._record([*self._without_calls, result])
        self._note_uniform(planned)

    def _note_uniform(self, planned: _Planned) -> None:
        """Tell the pace if all runs of this group are finished and have equal rewards."""
        if self._pace is None or planned.split != "train" or planned.group_size == 1:
            return
        runs = [dataclasses.replace(planned, run=run).key for run in range(planned.group_size)]
        finished = [self._results.finished[key].reward for key in runs if key in self._results.finished]
        rewards = [reward for reward in finished if reward is not None]
        if len(finished) == planned.group_size and rewards and min(rewards) == max(rewards):
            self._pace.note_uniform_group()

    def _record(self, results: list[RunResult]) -> None:
        self._without_calls = []
        for result in results:
            self._results.add(result)

    async def _complete(self, planned: _Planned) -> RunResult:
        attempt = 0
        while True:
            attempt += 1
            session_id = self._session_id(planned, attempt)
            session = await self._client.create_session(**_fields(self._settings, planned, session_id, self._results))
            directory = self._results.directory / "runs" / session_id
            # A creation may be answered from a proxy's memory, without the turns so far.
            known = await self._client.session(session_id) if self._results.is_resumed else session.data
            if known["status"] == "ended":
                if known["termination_reason"] == INTERRUPTED or known["num_turns"] == 0:
                    continue
                return _result(planned, known, known["termination_reason"] or "", 0.0)
            if known["status"] == "expired":
                continue
            played = self._grading.stored(directory)
            if played is None and known["num_turns"] > 0:
                await session.end(reason=INTERRUPTED)
                continue
            return await self._play_and_grade(planned, session, directory, played)

    async def _play_and_grade(
        self, planned: _Planned, session: AsyncSessionHandle, directory: Path, played: AgentEnd | None
    ) -> RunResult:
        run = PlannedRun(
            task=planned.task,
            run=planned.run,
            split=planned.split,
            session_id=session.session_id,
            directory=directory,
            workdir=(directory / "work").absolute(),
            address=Address(
                session.base_url,
                session.api_key,
                self._model.name,
                (directory / "home").absolute(),
                self._model.context_tokens,
            ),
        )
        is_resumed = played is not None
        if played is None:
            await asyncio.to_thread(self._prepare, run)
            played = await self._player.play(run)
            self._grading.store(directory, played)
        ended, error = await self._grading.grade(run, played, is_resumed=is_resumed)
        if not self._settings.keep_workdirs:
            await asyncio.to_thread(_clean, directory, keep=self._settings.call is None)
        return _result(planned, ended, played.termination_reason, played.seconds, played.error or error)

    def _prepare(self, run: PlannedRun) -> None:
        if run.directory.exists():
            shutil.rmtree(run.directory)
        run.address.home.mkdir(parents=True)
        if self._settings.workdir is None:
            run.workdir.mkdir()
        else:
            shutil.copytree(self._settings.workdir, run.workdir, symlinks=True)
        write_whole(run.directory / "task.json", json.dumps(run.task.fields, ensure_ascii=False))

    def _session_id(self, planned: _Planned, attempt: int) -> str:
        parts = [self._results.name, planned.split, str(planned.pass_index), planned.task.slug, str(planned.run)]
        return "-".join(parts) + (f".{attempt}" if attempt > 1 else "")


def no_call_cause(result: RunResult, settings: RunSettings) -> str:
    """Return how a run without a model call ended, the probable cause, what to do, and the end of the agent's log."""
    name = Path("workers.log") if settings.call is not None else Path("runs", result.session_id, "agent.log")
    log = settings.directory() / name
    end = f"; the end of its log {log}:\n{tail_of(log)}" if log.exists() and log.stat().st_size else ""
    return f"({result.error or result.termination_reason}): {_probable_cause(result, settings)}{end}"


def _probable_cause(result: RunResult, settings: RunSettings) -> str:
    if result.termination_reason not in ("exit_status_0", "timeout"):
        return "the agent failed before its first call"
    if settings.call is not None:
        return "the function did not find the proxy; its client needs run.base_url and run.api_key"
    return "the agent did not find the proxy; point it by TURNWISE_BASE_URL or OPENAI_BASE_URL, or name it with --as"


def _fields(settings: RunSettings, planned: _Planned, session_id: str, results: Results) -> SessionFields:
    fields = SessionFields(
        session_id=session_id,
        task_id=planned.task.task_id,
        run=planned.run,
        split=planned.split,
        credit=settings.credit,
        gamma=settings.gamma,
        sampling=settings.sampling,
        metadata={"rollouts": results.name, "pass": planned.pass_index},
    )
    if planned.split == "train" and planned.group_size > 1:
        fields["group_id"] = f"{results.name}-{planned.pass_index}-{planned.task.slug}"
        fields["group_size"] = planned.group_size
    return fields


def _result(planned: _Planned, session: Json, reason: str, seconds: float, error: str | None = None) -> RunResult:
    is_refused = session["termination_reason"] == FOREIGN_REWARDS
    return RunResult(
        session_id=session["session_id"],
        task_id=planned.task.task_id,
        run=planned.run,
        pass_index=planned.pass_index,
        split=planned.split,
        reward=None if is_refused else session["reward"],
        termination_reason=FOREIGN_REWARDS if is_refused else reason,
        num_turns=session["num_turns"],
        seconds=round(seconds, 3),
        error=error,
    )


def _clean(directory: Path, *, keep: bool) -> None:
    """Delete a finished run's copies, or its whole directory if it has no log."""
    if not keep:
        shutil.rmtree(directory, ignore_errors=True)
        return
    for name in ("work", "home"):
        shutil.rmtree(directory / name, ignore_errors=True)


def _first(failures: BaseExceptionGroup[Any]) -> BaseException:
    failure: BaseException = failures
    while isinstance(failure, BaseExceptionGroup):
        failure = failure.exceptions[0]
    return failure
