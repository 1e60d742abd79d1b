"""Run a task's workflow several times, as Trinity-RFT's explorer does, each run in its own session.

A failed run does not affect the others. Its experiences are not returned, as in Trinity; the ledger stores them, and
the session's termination reason is `error`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import traceback
from typing import Literal

from turnwise.workflows.experience import Experience
from turnwise.workflows.model import ModelWrapper
from turnwise.workflows.tasks import Task, TaskWorkflow

logger = logging.getLogger(__name__)

Mode = Literal["sequential", "asynchronous", "multi-threading"]


@dataclasses.dataclass
class Status:
    """The result of the runs of a task."""

    completed_runs: int
    total_runs: int
    metrics: list[dict[str, float]]
    """Metrics of each completed run."""
    message: str | None = None
    """The first failure's traceback; None without a failure."""

    @property
    def ok(self) -> bool:
        """Whether all runs were completed."""
        return self.completed_runs == self.total_runs


@dataclasses.dataclass
class _Run:
    experiences: list[Experience]
    metrics: dict[str, float]
    error: str | None = None


class WorkflowRunner:
    """Runs tasks with one rollout model."""

    def __init__(
        self,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
        *,
        concurrent_mode: Mode = "sequential",
    ) -> None:
        self.model = model
        self.auxiliary_models = auxiliary_models
        self.concurrent_mode = concurrent_mode

    async def run_task(
        self,
        task: Task,
        repeat_times: int = 1,
        run_id_base: int = 0,
        *,
        collect_partial_runs: bool = True,
    ) -> tuple[Status, list[Experience]]:
        """Run a task `repeat_times` times; run numbers start at `run_id_base`.

        Args:
            task: the task.
            repeat_times: number of runs.
            run_id_base: number of the first run; the runs of a task may be split over several calls.
            collect_partial_runs: whether runs after a failed one still count.

        Returns:
            The status, and the experiences of the completed runs; no experiences for an evaluation.
        """
        numbers = range(run_id_base, run_id_base + repeat_times)
        runs = await self._runs(task, numbers, collect_partial_runs=collect_partial_runs)
        completed = [run for run in runs if run.error is None]
        message = next((run.error for run in runs if run.error is not None), None)
        status = Status(len(completed), repeat_times, [run.metrics for run in completed], message)
        return status, [] if task.is_eval else [made for run in completed for made in run.experiences]

    async def _runs(self, task: Task, numbers: range, *, collect_partial_runs: bool) -> list[_Run]:
        if self.concurrent_mode != "sequential" and collect_partial_runs:
            return list(await asyncio.gather(*(self._run(task, number) for number in numbers)))
        runs: list[_Run] = []
        for number in numbers:
            runs.append(await self._run(task, number))
            if runs[-1].error is not None and not collect_partial_runs:
                break
        return runs

    async def _run(self, task: Task, number: int) -> _Run:
        began = time.monotonic()
        try:
            if self.concurrent_mode == "multi-threading":
                made = await asyncio.to_thread(lambda: asyncio.run(self._work_alone(task, number)))
            else:
                made = await self._work(task, number)
        except Exception as error:  # noqa: BLE001 user code: its failure is this run's result; other runs continue
            logger.warning("run %d of task %r failed: %r", number, task.task_id, error)
            return _Run([], {}, traceback.format_exc().rstrip())
        for experience in made:
            _complete(experience, task, number)
        return _Run(made, {**_means(made), "time/run_execution": time.monotonic() - began})

    async def _work_alone(self, task: Task, number: int) -> list[Experience]:
        """Run in a new event loop, which is closed together with its connections after the run."""
        try:
            return await self._work(task, number)
        finally:
            await self.model.async_client.transport.aclose()

    async def _work(self, task: Task, number: int) -> list[Experience]:
        workflow: TaskWorkflow = task.to_workflow(
            self.model.clone_with_isolated_history(run=number), self.auxiliary_models
        )
        if workflow.asynchronous:
            return await workflow.run_async()
        return await asyncio.to_thread(workflow.run)  # other runs continue on the event loop meanwhile


def _complete(experience: Experience, task: Task, number: int) -> None:
    """Fill in the fields that a workflow does not know; keep a task id that it set."""
    experience.eid.run = number
    experience.eid.batch = task.batch_id
    if experience.eid.task == "":
        experience.eid.task = task.task_id
    experience.info.update(use_count=0, task_index=task.index)


def _means(experiences: list[Experience]) -> dict[str, float]:
    """Return the mean of each metric over a run's experiences."""
    names = {name for experience in experiences for name in experience.metrics}
    values = {name: [e.metrics[name] for e in experiences if name in e.metrics] for name in sorted(names)}
    return {name: sum(found) / len(found) for name, found in values.items()}
