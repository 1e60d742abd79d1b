"""Trinity-RFT's `Task` and the base class of its workflows: a task creates a workflow, which returns experiences."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, Any

from turnwise.client.wire import SessionFields
from turnwise.types import Json
from turnwise.workflows.experience import Experience

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
    """-1 disables it."""
    logprobs: int | None = None
    max_tokens: int | None = None
    n: int = 1
    """Number of runs of the task."""


@dataclasses.dataclass
class Task:
    """A task and its workflow."""

    workflow: type[TaskWorkflow] | None = None
    repeat_times: int | None = None
    """Number of runs in the task's group."""
    format_args: FormatConfig = dataclasses.field(default_factory=FormatConfig)
    rollout_args: GenerationConfig = dataclasses.field(default_factory=GenerationConfig)
    workflow_args: Json = dataclasses.field(default_factory=dict)
    reward_fn_args: Json = dataclasses.field(default_factory=dict)
    is_eval: bool = False
    reward_fn: Any = None
    raw_task: Json | None = None
    """The sample of the data set."""
    batch_id: int | str = ""
    task_id: int | str = ""
    index: Json = dataclasses.field(default_factory=dict)

    def to_workflow(self, model: ModelWrapper, auxiliary_models: list[ModelWrapper] | None = None) -> TaskWorkflow:
        """Return a workflow object for this task."""
        if self.workflow is None:
            raise ValueError(f"task {self.task_id!r} names no workflow: set Task.workflow to a class")
        return self.workflow(model=model, task=self, auxiliary_models=auxiliary_models)

    @property
    def task_desc(self) -> str | None:
        """The sample's prompt."""
        return (self.raw_task or {}).get(self.format_args.prompt_key)

    @property
    def truth(self) -> str | None:
        """The sample's correct answer."""
        return (self.raw_task or {}).get(self.format_args.response_key)

    def to_dict(self) -> Json | None:
        """Return the sample."""
        return self.raw_task

    def session_fields(self) -> SessionFields:
        """Return the fields of the sessions of this task's runs."""
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
        """The same as `can_reset`."""
        return self.can_reset

    @property
    def repeatable(self) -> bool:
        """The same as `can_repeat`."""
        return self.can_repeat

    @property
    def asynchronous(self) -> bool:
        """The same as `is_async`."""
        return self.is_async

    def reset(self, task: Task) -> None:
        """Switch to another task."""
        raise NotImplementedError(f"{type(self).__name__} cannot take {task.task_id!r}: define reset()")

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        """Set the number of runs of the next call, numbered from `run_id_base`."""
        message = f"{type(self).__name__} cannot repeat {repeat_times!r} runs from {run_id_base!r} on"
        raise NotImplementedError(f"{message}: define set_repeat_times()")

    def run(self) -> list[Experience]:
        """Run the task."""
        raise NotImplementedError(f"{type(self).__name__} must define run()")

    async def run_async(self) -> list[Experience]:
        """Run the task in an event loop."""
        raise NotImplementedError(f"{type(self).__name__} must define run_async()")


def _client_of(model: ModelWrapper, *, is_async: bool) -> Any:
    return model.get_openai_async_client() if is_async else model.get_openai_client()
