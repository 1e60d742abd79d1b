"""Episodes as rows of tokens for verl, in the order of its batch; each row is a step or a trajectory.

Rows contain only captured tokens. rLLM tokenises the last conversation again; here a row joins the steps whose prompts
extend one another, and tokens that no step sampled are masked.
"""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from turnwise.types import Json
from turnwise.workflows import Episode, ModelOutput, TerminationReason, Trajectory

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """A prompt and the tokens after it."""

    prompt: list[int]
    response: list[int]
    mask: list[int]
    logprobs: list[float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VerlRow:
    """One row of a verl batch."""

    tokens: Tokens
    episode: Episode
    trajectory_id: str
    """`task_id_name`: the same for all rollouts of a task, whose rewards verl compares."""
    step_id: str
    step_num: int
    step_reward: float
    trajectory_reward: float
    is_last_step: bool

    @property
    def termination_reason(self) -> TerminationReason:
        return self.episode.termination_reason or TerminationReason.UNKNOWN


def rows_of(episode: Episode | None, task_id: str, *, stepwise: bool) -> list[VerlRow]:
    if episode is None:
        return []
    return [
        row for trajectory in episode.trajectories for row in _trajectory_rows(episode, trajectory, task_id, stepwise)
    ]


def _trajectory_rows(episode: Episode, trajectory: Trajectory, task_id: str, stepwise: bool) -> Iterator[VerlRow]:
    trajectory_id = f"{task_id}_{trajectory.name}"
    sampled = [(k, step) for k, step in enumerate(trajectory.steps) if _is_captured(step.model_output)]
    if len(sampled) < len(trajectory.steps):
        missing = len(trajectory.steps) - len(sampled)
        logger.warning(
            "[%s] %d steps of %r hold no captured tokens and are left out", episode.id, missing, trajectory_id
        )
    if not sampled:
        return
    outputs = [step.model_output for _, step in sampled if step.model_output]
    if stepwise:
        pieces = [
            (join([output]), f"{trajectory_id}_step{k}", step.reward)
            for (k, step), output in zip(sampled, outputs, strict=True)
        ]
    else:
        pieces = [(join(_last_chain(outputs, trajectory_id)), trajectory_id, trajectory.reward or 0.0)]
    for number, (tokens, step_id, reward) in enumerate(pieces, start=1):
        yield VerlRow(
            tokens=tokens,
            episode=episode,
            trajectory_id=trajectory_id,
            step_id=step_id,
            step_num=len(pieces),
            step_reward=reward,
            trajectory_reward=trajectory.reward or 0.0,
            is_last_step=number == len(pieces),
        )


def _is_captured(output: ModelOutput | None) -> bool:
    return output is not None and bool(output.completion_ids)


def _extends(later: ModelOutput, earlier: ModelOutput) -> bool:
    seen = [*earlier.prompt_ids, *earlier.completion_ids]
    return later.prompt_ids[: len(seen)] == seen


def _last_chain(outputs: Sequence[ModelOutput], trajectory_id: str) -> list[ModelOutput]:
    """Return the longest suffix of outputs in which each prompt extends the output before."""
    first = len(outputs) - 1
    while first > 0 and _extends(outputs[first], outputs[first - 1]):
        first -= 1
    if first > 0:
        # rLLM also keeps the last conversation only, and warns.
        logger.warning(
            "%r is not cumulative: its first %d steps are left out; use stepwise_advantage", trajectory_id, first
        )
    return list(outputs[first:])


def join(outputs: Sequence[ModelOutput]) -> Tokens:
    prompt = outputs[0].prompt_ids
    response: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for output in outputs:
        between = output.prompt_ids[len(prompt) + len(response) :]
        response += [*between, *output.completion_ids]
        mask += [0] * len(between) + [1] * len(output.completion_ids)
        logprobs += [0.0] * len(between) + list(output.logprobs)
    return Tokens(prompt=list(prompt), response=response, mask=mask, logprobs=logprobs)


def task_of(episode: Episode | None, position: int, task_ids: Sequence[str]) -> str:
    if episode is not None and episode.task_id in task_ids:
        return episode.task_id
    return task_ids[position]


def in_batch_order(episodes: Sequence[Episode], task_ids: Sequence[str]) -> list[Episode]:
    """Return episodes so that the one at each position belongs to the task at that position.

    verl repeats the rows of its batch by position, so rollouts of one task that are not adjacent in the batch would
    otherwise be paired with another task's results.
    """
    waiting: dict[str, list[Episode]] = {}
    by_first_appearance = iter(episodes)
    for task_id, num_rollouts in Counter(task_ids).items():
        waiting[task_id] = [next(by_first_appearance) for _ in range(num_rollouts)]
    return [waiting[task_id].pop(0) for task_id in task_ids]


def is_kept(row: VerlRow, filtering: Json) -> bool:
    return not (filtering.get("enable") and filtering.get(f"mask_{row.termination_reason.value}"))
