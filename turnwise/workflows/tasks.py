"""Trinity-RFT's `Task`, its workflows, and the runner, which runs a task several times as the explorer does.

A task creates a workflow, which returns experiences; each run has its own session. A failed run does not affect the
others. Its experiences are not returned, as in Trinity; the ledger stores them, and the termination reason of the
session is `error`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
import traceback
from typing import TYPE_CHECKING, Any, Literal

from turnwise.client.wire import SessionFields
from turnwise.types import Json
from turnwise.workflows.experience import Experience
from turnwise.workflows.model import ModelWrapper

if TYPE_CHECKING:
    from turnwise.workflows.model import ModelWrapper


@dataclasses.dataclass
class FormatConfig:
    """The fields of a raw sample that are read."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    system_prompt: str | None = None
    reply_prefix: str | None = None


@dataclasses.dataclass
class GenerationConfig:
    """Sampling parameters; None uses the engine's default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int = -1
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1


@dataclasses.dataclass
class Task:
    """A task and its workflow."""

    workflow: type[TaskWorkflow] | None = None
    repeat_times: int | None = None
    format_args: FormatConfig = dataclasses.field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)
    workflow_args: Json = dataclasses.field(default_factory=dict)
    reward_fn_args: Json = dataclasses.field(default_factory=dict)
    is_eval: bool = False
    reward_fn: Any = None
    raw_task: Json | None = None
    batch_id: int | str = ""
    task_id: int | str = ""
    index: Json = dataclasses.field(default_factory=dict)

    def to_workflow(self, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> TaskWorkflow:
        if self.workflow is None:
            raise ValueError(f"task {self.task_id!r} names no workflow: set Task.workflow to a class")
        return self.workflow(model=model, task=self, auxiliary_models=auxiliary_models)

    @property
    def task_desc(self) -> str | None:
        return (self.raw_task or {}).get(self.format_args.prompt_key)

    @property
    def truth(self) -> str | None:
        return (self.raw_task or {}).get(self.format_args.response_key)

    def to_dict(self) -> Json | None:
        return self.raw_task

    def session_fields(self) -> SessionFields:
        fields: SessionFields = {"split": "eval" if self.is_eval else "train"}
        if self.task_id != "":
            fields["task_id"] = str(self.task_id)
        # Without a batch, a repeated task would join its earlier group, which is complete.
        if self.task_id != "" and self.batch_id != "":
            fields["group_id"] = f"{self.batch_id}/{self.task_id}"
            if self.repeat_times:
                fields["group_size"] = self.repeat_times
        return fields


class TaskWorkflow:
    """The base class of Trinity's workflows: one object, one run, a list of experiences."""

    can_reset: bool = False
    """Whether one object can run another task; it then defines `reset`."""
    can_repeat: bool = False
    """Whether one call makes several runs; it then defines `set_repeat_times`."""
    is_async: bool = False
    """Whether `run_async` is called instead of `run`."""

    def __init__(self, *, task: Task, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = auxiliary_models
        self.auxiliary_models: list[Any] | None = None
        if auxiliary_models:
            self.auxiliary_models = [_client_of(model, is_async=self.is_async) for model in auxiliary_models]
        self.run_id_base = 0
        self.logger = logging.getLogger(type(self).__module__)

    @property
    def resettable(self) -> bool:
        return self.can_reset

    @property
    def repeatable(self) -> bool:
        return self.can_repeat

    @property
    def asynchronous(self) -> bool:
        return self.is_async

    def reset(self, task: Task) -> None:
        raise NotImplementedError(f"{type(self).__name__} cannot take {task.task_id!r}: define reset()")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        message = f"{type(self).__name__} cannot repeat {repeat_times!r} runs from {run_id_base!r} on"
        raise NotImplementedError(f"{message}: define set_repeat_times()")

    def run(self) -> list[Experience]:
        raise NotImplementedError(f"{type(self).__name__} must define run()")

    async def run_async(self) -> list[Experience]:
        raise NotImplementedError(f"{type(self).__name__} must define run_async()")


def _client_of(model: ModelWrapper, *, is_async: bool) -> Any:
    return model.get_openai_async_client() if is_async else model.get_openai_client()


logger = logging.getLogger(__name__)

Mode = Literal["sequential", "asynchronous", "multi-threading"]


@dataclasses.dataclass
class Status:
    """The result of the runs of a task."""

    completed_runs: int
    total_runs: int
    metrics: list[dict[str, float]]
    message: str | None = None
    """The first failure's traceback; None without a failure."""

    @property
    def ok(self) -> bool:
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
        """Run a task `repeat_times` times; return the status and the experiences of the completed runs.

        An evaluation has no experiences. Run numbers start at `run_id_base`, so the runs of a task may be split over
        several calls. Runs after a failed one still count with `collect_partial_runs`.
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
    names = {name for experience in experiences for name in experience.metrics}
    values = {name: [e.metrics[name] for e in experiences if name in e.metrics] for name in sorted(names)}
    return {name: sum(found) / len(found) for name, found in values.items()}
