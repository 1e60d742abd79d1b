"""The model replies of a workflow: rLLM's engine interface over sessions of the proxy.

The session belongs to the run, not to the workflow object. It is stored in a context variable, so agents, sub-agents
and tasks that the workflow starts sample in the session of their run, while one engine object serves many runs.
"""

from __future__ import annotations

import contextvars
import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from turnwise.client import AsyncClient, AsyncSessionHandle
from turnwise.client.wire import given
from turnwise.errors import InvalidRequest
from turnwise.types import Json
from turnwise.workflows.episodes import Episode, ModelOutput, TerminationEvent, TerminationReason, Trajectory

if TYPE_CHECKING:
    from openai.types.chat import ChatCompletion

_current_session: contextvars.ContextVar[AsyncSessionHandle | None] = contextvars.ContextVar("session", default=None)

VERSION_HEADER = "x-policy-version"
RETRIED = "retried"


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
        return f"{self.task_id}:{self.rollout_idx}"


class RolloutEngine:
    """Samples replies. Subclasses implement `_get_model_response`, or override `get_model_response`."""

    validate: bool = False
    weight_version: int | None = None
    pad_token_id: int = 0

    async def get_model_response(self, messages: list[Json], **kwargs: Any) -> ModelOutput:
        """Return the model's reply with the policy version that sampled its first token."""
        version = self.weight_version  # before the await: weights may change while the reply is sampled
        output = await self._get_model_response(messages, **kwargs)
        if output.weight_version is None:
            output.weight_version = version
        return output

    async def _get_model_response(self, messages: list[Json], **kwargs: Any) -> ModelOutput:
        raise NotImplementedError(f"{type(self).__name__} must define get_model_response")

    async def wake_up(self) -> None: ...

    async def sleep(self) -> None: ...

    async def begin_run(self, run: RunIdentity) -> None: ...

    async def end_run(self, episode: Episode | None, *, retried: bool = False) -> None: ...


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
        """Use a client, which all runs share, or create one for this base URL.

        Without `model` its name is read from the proxy. Calls have `sampling_params` by default, or
        `val_sampling_params` if `validate` is on.
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
        stepwise = session.data.get("credit") == "step_wise"
        if episode is not None and not stepwise and len(_sampled(episode)) > 1:
            await self.client.create_session(session_id=session.session_id, credit="step_wise")
        lines = reward_lines(episode, session, stepwise=stepwise) if episode is not None else []
        if lines:
            await self.client.rewards(lines)
        await session.end(reason=(reason or TerminationReason.UNKNOWN).value)

    async def _get_model_response(
        self, messages: list[Json], *, application_id: str | None = None, **kwargs: Any
    ) -> ModelOutput:
        session = _current_session.get() or await self._session_named(application_id)
        defaults = self.val_sampling_params if self.validate else self.sampling_params
        model = self.model or await self.client.served_model()
        body = {"model": model, "logprobs": True, **defaults, **kwargs, "messages": messages}
        body["extra_body"] = {"return_token_ids": True, **body.get("extra_body", {})}
        completion, version = await self._complete(session, body)
        output = model_output(completion, version)
        return output or output_of_turn(completion, await self.client.turn(completion.id, prompt="whole"))

    async def _session_named(self, application_id: str | None) -> AsyncSessionHandle:
        if not application_id:
            raise InvalidRequest(
                "no session to sample in: run the workflow by an AgentWorkflowEngine, or pass application_id=uid",
                param="application_id",
            )
        return await self.client.create_session(session_id=application_id)

    async def _complete(self, session: AsyncSessionHandle, body: Json) -> tuple[ChatCompletion, int | None]:
        """Return the reply and the policy version that sampled its first token, if the reply names it."""
        import openai

        try:
            reply = await session.openai_async().chat.completions.with_raw_response.create(**body)
        except openai.BadRequestError as error:
            if "maximum context length" in str(error):
                raise TerminationEvent(TerminationReason.MAX_PROMPT_LENGTH_EXCEEDED) from error
            raise
        version = reply.headers.get(VERSION_HEADER)
        return reply.parse(), None if version is None else int(version)


def model_output(completion: ChatCompletion, version: int | None) -> ModelOutput | None:
    """Return a reply as rLLM's record; None if the reply lacks its tokens, logprobs or version."""
    choice = completion.choices[0]
    prompt_ids: list[int] | None = getattr(completion, "prompt_token_ids", None)
    token_ids: list[int] | None = getattr(choice, "token_ids", None)
    scored = choice.logprobs.content if choice.logprobs else None
    if prompt_ids is None or token_ids is None or scored is None or len(scored) != len(token_ids) or version is None:
        return None
    logprobs = np.array([token.logprob for token in scored], np.float32)  # as the ledger stores them
    return _record(completion, prompt_ids, token_ids, logprobs.tolist(), version)


def output_of_turn(completion: ChatCompletion, turn: Json) -> ModelOutput:
    tokens = turn["prompt_token_ids"], turn["token_ids"], turn["logprobs"]
    return _record(completion, *tokens, turn["policy_version_first"])


def _record(
    completion: ChatCompletion, prompt_ids: list[int], token_ids: list[int], logprobs: list[float], version: int
) -> ModelOutput:
    choice = completion.choices[0]
    return ModelOutput(
        text=choice.message.content or "",
        content=choice.message.content or "",
        reasoning=getattr(choice.message, "reasoning", None) or "",
        tool_calls=[call.model_dump() for call in choice.message.tool_calls or []],
        prompt_ids=prompt_ids,
        completion_ids=token_ids,
        logprobs=logprobs,
        prompt_length=len(prompt_ids),
        completion_length=len(token_ids),
        finish_reason=choice.finish_reason,
        weight_version=version,
        turn_id=completion.id,
    )


def reward_lines(episode: Episode, session: AsyncSessionHandle, *, stepwise: bool = False) -> list[Json]:
    """Return an episode's rewards for the ledger.

    With `stepwise`, each turn gets the reward of its step. Without it, each turn of an episode of several trajectories
    gets the reward of its trajectory, and a single trajectory's reward is that of the session.
    """
    trajectories = episode.trajectories
    if stepwise or len(_sampled(episode)) > 1:
        lines = [
            {"turn_id": step.model_output.turn_id, "value": step.reward if stepwise else trajectory.reward or 0.0}
            for trajectory in trajectories
            for step in trajectory.steps
            if step.model_output and step.model_output.turn_id
        ]
        if lines:
            return lines
    # A session without sampled steps needs a reward too; otherwise it is unfinished and its group waits for it.
    return [{"session_id": session.session_id, "value": sum(trajectory.reward or 0.0 for trajectory in trajectories)}]


def _sampled(episode: Episode) -> list[Trajectory]:
    return [
        trajectory
        for trajectory in episode.trajectories
        if any(step.model_output and step.model_output.turn_id for step in trajectory.steps)
    ]
