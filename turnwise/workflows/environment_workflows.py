"""rLLM's ready workflows: one agent in one environment, for one turn, several turns, or one growing conversation.

The agent turns observations into messages and replies into actions; the environment answers actions with rewards.
Methods of the environment run in the executor, so a slow environment does not block other runs.
"""

from __future__ import annotations

from typing import Any, NoReturn

from turnwise.errors import InvalidRequest, SettingsError
from turnwise.settings import load_object
from turnwise.types import Json
from turnwise.workflows.episodes import Episode, ModelOutput, TerminationEvent, TerminationReason
from turnwise.workflows.workflow import BaseAgent, BaseEnv, Workflow


class SingleTurnWorkflow(Workflow):
    """One reply of the model, one action on the environment."""

    max_steps = 1

    def __init__(
        self,
        agent_cls: type[BaseAgent] | str,
        env_cls: type[BaseEnv] | str,
        agent_args: Json | None = None,
        env_args: Json | None = None,
        **kwargs: Any,
    ) -> None:
        """Create the agent and the environment, each of a class or of its import path `module:Class`.

        Raises:
            InvalidRequest: an import path that names no class.
        """
        super().__init__(**kwargs)
        self.agent: BaseAgent = _class_of(agent_cls)(**(agent_args or {}))
        self.env: BaseEnv = _class_of(env_cls)(**(env_args or {}))

    async def run(self, task: Json, uid: str, **kwargs: Any) -> Episode | None:
        observation, info = await self.run_in_executor(self._restart, task, uid)
        self.agent.update_from_env(observation, 0.0, False, info)
        for _ in range(self.max_steps):
            output = await self._sample(uid, kwargs)
            action = self.agent.update_from_model(output.text)
            self._attach(output)
            observation, reward, done, info = await self.run_in_executor(self.env.step, action)
            self.agent.update_from_env(observation, reward, done, info)
            if output.finish_reason == "length":
                _end(TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED)
            if done:
                _end(TerminationReason.ENV_DONE)
        _end(TerminationReason.MAX_TURNS_EXCEEDED)

    async def _sample(self, uid: str, kwargs: Json) -> ModelOutput:
        output: ModelOutput = await self.rollout_engine.get_model_response(
            self.agent.chat_completions, application_id=uid, **kwargs
        )
        return output

    def _restart(self, task: Json, uid: str) -> tuple[Any, Json]:
        self.reset(task, uid)
        return self.env.reset(task)

    def _attach(self, output: ModelOutput) -> None:
        steps = self.agent.trajectory.steps
        if steps and steps[-1].model_output is None:
            steps[-1].model_output = output


class MultiTurnWorkflow(SingleTurnWorkflow):
    """At most `max_steps` replies and actions."""

    def __init__(self, *args: Any, max_steps: int = 5, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.max_steps = max_steps


class CumulativeWorkflow(MultiTurnWorkflow):
    """Several turns of one growing conversation, whose tokens after the first prompt have one limit in total."""

    def __init__(self, *args: Any, max_response_length: int | None = None, **kwargs: Any) -> None:
        """Set the limit of tokens after the first prompt; None reads the rollout engine's.

        Raises:
            InvalidRequest: neither the workflow nor the rollout engine has a limit.
        """
        super().__init__(*args, **kwargs)
        limit = max_response_length or getattr(self.rollout_engine, "max_response_length", None)
        if limit is None:
            raise InvalidRequest(
                "CumulativeWorkflow needs a limit of tokens: give max_response_length in workflow_args, "
                "or a rollout engine that has it"
            )
        self.max_response_length = int(limit)
        self.prompt_length = 0
        self._num_tokens = 0

    async def _sample(self, uid: str, kwargs: Json) -> ModelOutput:
        max_tokens = self.max_response_length - (self._num_tokens - self.prompt_length)
        if max_tokens <= 0:
            _end(TerminationReason.MAX_RESPONSE_LENGTH_EXCEEDED)
        output = await super()._sample(uid, {**kwargs, "max_tokens": max_tokens})
        self.prompt_length = self.prompt_length or output.prompt_length
        self._num_tokens = output.prompt_length + output.completion_length
        return output

    def reset(self, task: Json | None = None, uid: str | None = None) -> None:
        super().reset(task, uid)
        self.prompt_length = self._num_tokens = 0


def _end(reason: TerminationReason) -> NoReturn:
    raise TerminationEvent(reason)


def _class_of(given: Any) -> Any:
    if not isinstance(given, str):
        return given
    try:
        return load_object(given, "class")
    except SettingsError as error:
        raise InvalidRequest(f"{given!r} names no class: give a class, or an import path `module:Class`") from error
