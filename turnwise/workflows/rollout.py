"""The model replies of a workflow: rLLM's engine interface over sessions of the proxy.

The session belongs to the run, not to the workflow object. It is stored in a context variable, so agents, sub-agents
and tasks that the workflow starts sample in the session of their run, while one engine object serves many runs.
"""

from __future__ import annotations

import contextvars
import dataclasses
from typing import TYPE_CHECKING, Any

from turnwise.client import AsyncClient, AsyncSessionHandle
from turnwise.client.wire import given
from turnwise.errors import InvalidRequest
from turnwise.types import Json
from turnwise.workflows.episodes import Episode, ModelOutput, TerminationEvent, TerminationReason

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

_current_session: contextvars.ContextVar[AsyncSessionHandle | None] = contextvars.ContextVar("session", default=None)

RETRIED = "retried"
"""Termination reason of a session whose run failed and was retried in another session."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunIdentity:
    """The run that a call belongs to."""

    task_id: str
    rollout_idx: int
    group_id: str | None = None
    group_size: int | None = None
    credit: str = "propagate"

    @property
    def uid(self) -> str:
        """The episode's id: `task_id:rollout_idx`."""
        return f"{self.task_id}:{self.rollout_idx}"


class RolloutEngine:
    """Samples replies. Subclasses implement `_get_model_response`, or override `get_model_response`."""

    validate: bool = False
    """Whether runs are evaluations."""
    weight_version: int | None = None
    """Policy version that is served, if the engine knows it."""
    pad_token_id: int = 0
    """Padding of batches; masks are computed from lengths, so its value does not matter."""

    async def get_model_response(self, messages: list[Json], **kwargs: Any) -> ModelOutput:
        """Return the model's reply with the policy version that sampled its first token."""
        version = self.weight_version  # before the await: weights may change while the reply is sampled
        output = await self._get_model_response(messages, **kwargs)
        if output.weight_version is None:
            output.weight_version = version
        return output

    async def _get_model_response(self, messages: list[Json], **kwargs: Any) -> ModelOutput:
        raise NotImplementedError(f"{type(self).__name__} must define get_model_response")

    async def wake_up(self) -> None:
        """Prepare for sampling."""

    async def sleep(self) -> None:
        """Release memory for a trainer on the same device."""

    async def begin_run(self, run: RunIdentity) -> None:
        """Set the run of the calling task."""

    async def end_run(self, episode: Episode | None, *, retried: bool = False) -> None:
        """Record how the run of the calling task ended."""


class SessionRolloutEngine(RolloutEngine):
    """Samples through the proxy, one session for each run, and returns what the proxy captured."""

    def __init__(
        self,
        client: AsyncClient | str,
        *,
        model: str | None = None,
        sampling_params: Json | None = None,
        val_sampling_params: Json | None = None,
        pad_token_id: int = 0,
    ) -> None:
        """Use a client, or create one for this base URL.

        Args:
            client: client of the proxy; all runs share it.
            model: the served model's name; None reads it from the proxy.
            sampling_params: default parameters of all calls.
            val_sampling_params: default parameters if `validate` is on.
            pad_token_id: padding of verl's batches.
        """
        self.client = AsyncClient(client) if isinstance(client, str) else client
        self.model = model
        self.sampling_params = dict(sampling_params or {})
        self.val_sampling_params = self.sampling_params if val_sampling_params is None else dict(val_sampling_params)
        self.pad_token_id = pad_token_id

    async def begin_run(self, run: RunIdentity) -> None:
        """Create a session for the run; every attempt gets its own session."""
        fields: Any = given(
            {
                "task_id": run.task_id,
                "run": run.rollout_idx,
                "group_id": run.group_id,
                "group_size": run.group_size,
                "split": "eval" if self.validate else "train",
                "credit": run.credit,
                "metadata": {"uid": run.uid},
            }
        )
        _current_session.set(await self.client.create_session(**fields))

    async def end_run(self, episode: Episode | None, *, retried: bool = False) -> None:
        """Write the episode's rewards to the ledger and end the session."""
        session = _current_session.get()
        if session is None:
            return
        _current_session.set(None)
        if retried:
            await session.end(reason=RETRIED)
            return
        reason = episode.termination_reason if episode is not None else None
        lines = reward_lines(episode, session) if episode is not None else []
        if lines:
            await self.client.rewards(lines)
        await session.end(reason=(reason or TerminationReason.UNKNOWN).value)

    async def _get_model_response(
        self, messages: list[Json], *, application_id: str | None = None, **kwargs: Any
    ) -> ModelOutput:
        session = _current_session.get() or await self._session_named(application_id)
        defaults = self.val_sampling_params if self.validate else self.sampling_params
        model = self.model or await self.client.served_model()
        completion = await self._complete(session, {"model": model, **defaults, **kwargs, "messages": messages})
        return model_output(completion, await self.client.turn(completion.id, prompt="whole"))

    async def _session_named(self, application_id: str | None) -> AsyncSessionHandle:
        if not application_id:
            raise InvalidRequest(
                "no session to sample in: run the workflow by an AgentWorkflowEngine, or pass application_id=uid",
                param="application_id",
            )
        return await self.client.create_session(session_id=application_id)

    async def _complete(self, session: AsyncSessionHandle, body: Json) -> ChatCompletion:
        import openai

        try:
            completion: ChatCompletion = await session.openai_async().chat.completions.create(**body)
        except openai.BadRequestError as error:
            if "maximum context length" in str(error):
                raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED) from error
            raise
        return completion


def model_output(completion: ChatCompletion, turn: Json) -> ModelOutput:
    """Return a reply as rLLM's record, with the tokens from the ledger."""
    message = completion.choices[0].message
    return ModelOutput(
        text=message.content or "",
        content=message.content or "",
        reasoning=getattr(message, "reasoning", None) or "",
        tool_calls=[call.model_dump() for call in message.tool_calls or []],
        prompt_ids=turn["prompt_token_ids"],
        completion_ids=turn["token_ids"],
        logprobs=turn["logprobs"],
        prompt_length=len(turn["prompt_token_ids"]),
        completion_length=len(turn["token_ids"]),
        finish_reason=turn["finish_reason"],
        weight_version=turn["policy_version_first"],
        turn_id=turn["turn_id"],
    )


def reward_lines(episode: Episode, session: AsyncSessionHandle) -> list[Json]:
    """Return an episode's rewards for the ledger: one per step for its turn, or their sum for the session."""
    trajectories = episode.trajectories
    if session.data.get("credit") == "step_wise":
        judged = [(step.model_output, step.reward) for trajectory in trajectories for step in trajectory.steps]
        lines = [{"turn_id": output.turn_id, "value": reward} for output, reward in judged if output and output.turn_id]
        if lines:
            return lines
    # A session without sampled steps needs a reward too; otherwise it is unfinished and its group waits for it.
    return [{"session_id": session.session_id, "value": sum(trajectory.reward or 0.0 for trajectory in trajectories)}]
