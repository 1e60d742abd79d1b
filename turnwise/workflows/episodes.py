"""The records of a run, as in rLLM: steps, trajectories, an episode, and the reason for its end.

These are plain mutable records, because agents fill them as they run. Sampled tokens come from the ledger, through
`ModelOutput`.
"""

from __future__ import annotations

import dataclasses
import enum
import uuid
from typing import Any

from turnwise.types import Json


class TerminationReason(enum.Enum):
    """Why an episode ended."""

    MAX_PROMPT_LENGTH_EXCEEDED = "max_prompt_length_exceeded"
    MAX_RESPONSE_LENGTH_EXCEEDED = "max_response_length_exceeded"
    ENV_DONE = "env_done"
    MAX_TURNS_EXCEEDED = "max_turns_exceeded"
    TIMEOUT = "timeout"
    UNKNOWN = "unknown"
    ERROR = "error"


class TerminationEvent(Exception):
    """Raised by a workflow to end its episode with a reason. This is the normal end, not a failure."""

    def __init__(self, reason: TerminationReason = TerminationReason.UNKNOWN) -> None:
        super().__init__(f"the episode ended: {reason.value}")
        self.reason = reason


@dataclasses.dataclass
class Action:
    """An action of an agent on its environment."""

    action: Any = None


@dataclasses.dataclass(kw_only=True)
class ModelOutput:
    """One reply of the model, with the tokens that the proxy captured."""

    text: str = ""
    content: str = ""
    reasoning: str = ""
    tool_calls: list[Any] = dataclasses.field(default_factory=list)
    prompt_ids: list[int] = dataclasses.field(default_factory=list)
    """Tokens of the whole prompt, as the engine received them."""
    completion_ids: list[int] = dataclasses.field(default_factory=list)
    multi_modal_inputs: Json | None = None
    logprobs: list[float] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[float] | None = None
    routing_matrices: list[Any] | None = None
    prompt_length: int = 0
    completion_length: int = 0
    finish_reason: str | None = None
    weight_version: int | None = None
    metrics: Json | None = None
    turn_id: str | None = None
    """The turn in the ledger; the reward of a step refers to it."""


@dataclasses.dataclass(kw_only=True)
class Step:
    """One iteration of an agent's loop."""

    chat_completions: list[Json] = dataclasses.field(default_factory=list)
    observation: Any = None
    thought: str = ""
    action: Any = None
    model_response: str = ""
    model_output: ModelOutput | None = None
    info: Json = dataclasses.field(default_factory=dict)
    reward: float = 0.0
    """The raw reward; after post-processing, the reward with bonus and discounted return if they are enabled."""
    done: bool = False
    mc_return: float = 0.0


@dataclasses.dataclass(kw_only=True)
class Trajectory:
    """The steps of one agent."""

    uid: str = dataclasses.field(default_factory=lambda: str(uuid.uuid4()))
    name: str = "agent"
    task: Any = None
    steps: list[Step] = dataclasses.field(default_factory=list)
    reward: float = 0.0
    """Sum of the raw step rewards, after post-processing."""
    info: Json = dataclasses.field(default_factory=dict)

    def is_cumulative(self) -> bool:
        pairs = zip(self.steps, self.steps[1:], strict=False)
        return all(b.chat_completions[: len(a.chat_completions)] == a.chat_completions for a, b in pairs)


@dataclasses.dataclass(kw_only=True)
class Episode:
    """All trajectories of one run."""

    id: str = ""
    task: Any = None
    termination_reason: TerminationReason | None = None
    is_correct: bool = False
    trajectories: list[Trajectory] = dataclasses.field(default_factory=list)
    metrics: Json = dataclasses.field(default_factory=dict)
    info: Json = dataclasses.field(default_factory=dict)

    @property
    def task_id(self) -> str:
        return self.id.rpartition(":")[0] or self.id

    @property
    def rollout_idx(self) -> str:
        return self.id.rpartition(":")[2]
