"""Trinity-RFT's two credit policies: a reward for each step, or one reward for the run that all its steps share.

A run is a session of the proxy, which is open during the run. Rewards are written to the ledger immediately, and calls
name their step, so the samples and rewards of a run before an exception are stored and credited.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from turnwise.errors import InvalidRequest
from turnwise.workflows.experience import Experience
from turnwise.workflows.model import ModelWrapper
from turnwise.workflows.tasks import Task, TaskWorkflow

ENDED = "env_done"
OUT_OF_STEPS = "max_turns_exceeded"
FAILED = "error"


class _SteppedWorkflow(TaskWorkflow):
    """A loop of steps over one session."""

    credit: str

    def __init__(
        self,
        *,
        task: Task,
        model: ModelWrapper,
        auxiliary_models: list[ModelWrapper] | None = None,
        use_openai_client: bool = True,
    ) -> None:
        """Take a client of the rollout model, asynchronous in the asynchronous variants.

        Raises:
            InvalidRequest: the model keeps no history.
        """
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        if not model.enable_history:
            raise InvalidRequest(
                f"{type(self).__name__} needs a model with history: make the ModelWrapper with enable_history=True"
            )
        self.client: Any = None
        if use_openai_client:
            self.client = model.get_openai_async_client() if self.is_async else model.get_openai_client()
        self.experiences: list[Experience] = []
        """Experiences of the last run; complete also after an exception."""
        self._reason = OUT_OF_STEPS

    @property
    def max_step_num(self) -> int:
        raise NotImplementedError(f"{type(self).__name__} must define max_step_num")

    def step(self, step_num: int) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must define step() to take step {step_num!r}")

    async def step_async(self, step_num: int) -> bool:
        raise NotImplementedError(f"{type(self).__name__} must define step_async() to take step {step_num!r}")

    @contextlib.contextmanager
    def _session(self) -> Iterator[None]:
        self._begin()
        self.model.open(credit=self.credit, **self.task.session_fields())  # type: ignore[misc]
        try:
            yield
        except BaseException:
            self.experiences += self.model.extract_experience_from_history()
            self.model.end(FAILED)
            raise
        self.model.end(self._reason)

    @contextlib.asynccontextmanager
    async def _session_async(self) -> AsyncIterator[None]:
        self._begin()
        await self.model.open_async(credit=self.credit, **self.task.session_fields())  # type: ignore[misc]
        try:
            yield
        except BaseException:
            self.experiences += await self.model.extract_experience_from_history_async()
            await self.model.end_async(FAILED)
            raise
        await self.model.end_async(self._reason)

    def _begin(self) -> None:
        self.experiences = []
        self._reason = OUT_OF_STEPS

    def _keep(self, experiences: list[Experience], step: int) -> list[Experience]:
        for experience in experiences:
            experience.eid.step = step
        self.experiences += experiences
        return experiences

    def _go_on(self, answer: object) -> None:
        if not answer:
            self._reason = ENDED

    def _steps(self) -> Iterator[int]:
        for step in range(self.max_step_num):
            self.model.step = step
            yield step
            if self._reason == ENDED:
                return


class StepWiseRewardWorkflow(_SteppedWorkflow):
    """Each step has its own reward, which all samples of the step get."""

    credit = "step_wise"

    def run(self) -> list[Experience]:
        with self._session():
            for step in self._steps():
                self._go_on(self.step(step_num=step))
                made = self._keep(self.model.extract_experience_from_history(), step)
                reward = self.reward(made, step_num=step)
                if _give(made, reward):
                    self.model.reward(reward, step=step)
        return self.experiences

    def reward(self, exps: list[Experience], step_num: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define reward() for {len(exps)} of step {step_num!r}")


class AsyncStepWiseRewardWorkflow(StepWiseRewardWorkflow):
    """As the synchronous workflow, in an event loop and with an asynchronous client."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        async with self._session_async():
            for step in self._steps():
                self._go_on(await self.step_async(step_num=step))
                made = self._keep(await self.model.extract_experience_from_history_async(), step)
                reward = await self.reward_async(made, step_num=step)
                if _give(made, reward):
                    await self.model.reward_async(reward, step=step)
        return self.experiences

    async def reward_async(self, exps: list[Experience], step_num: int) -> float:
        raise NotImplementedError(
            f"{type(self).__name__} must define reward_async() for {len(exps)} of step {step_num!r}"
        )


class RewardPropagationWorkflow(_SteppedWorkflow):
    """The run has one reward, which all its samples get."""

    credit = "propagate"

    def run(self) -> list[Experience]:
        num_steps = 0
        with self._session():
            for step in self._steps():
                self._go_on(self.step(step_num=step))
                self._keep(self.model.extract_experience_from_history(), step)
                num_steps = step + 1
            reward = self.reward(self.experiences)
            _give(self.experiences, reward, num_steps)
            self.model.reward(reward)
        return self.experiences

    def reward(self, exps: list[Experience]) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define reward() for {len(exps)} experiences")


class AsyncRewardPropagationWorkflow(RewardPropagationWorkflow):
    """As the synchronous workflow, in an event loop and with an asynchronous client."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        num_steps = 0
        async with self._session_async():
            for step in self._steps():
                self._go_on(await self.step_async(step_num=step))
                self._keep(await self.model.extract_experience_from_history_async(), step)
                num_steps = step + 1
            reward = await self.reward_async(self.experiences)
            _give(self.experiences, reward, num_steps)
            await self.model.reward_async(reward)
        return self.experiences

    async def reward_async(self, exps: list[Experience]) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define reward_async() for {len(exps)} experiences")


def _give(experiences: list[Experience], reward: float, num_steps: int | None = None) -> bool:
    for experience in experiences:
        experience.reward = reward
        if num_steps is not None:
            experience.metrics["actual_env_steps"] = num_steps
    return bool(experiences)
