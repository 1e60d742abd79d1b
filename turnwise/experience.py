"""The trainable unit: what the store makes of turns and rewards, and what the trainer, exports and workflows read.

Shapes: L tokens of an experience, K turns whose sampled tokens it trains.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from turnwise.types import Credit, GroupKey, Json, Logprobs, SessionKey, Split, TokenIds, TrainedIn

HINTS = "hints"
"""Key of `Experience.info`: what people corrected, by turn. The first `kept` tokens of the turn's prompt, and then
`token_ids`, are its prompt with the correction."""


@dataclasses.dataclass(frozen=True, slots=True)
class EID:
    """Identity of an experience, as in Trinity-RFT."""

    batch: str = ""
    task: str = ""
    run: int = 0
    step: int = 0
    suffix: str = ""

    @property
    def uid(self) -> str:
        """The whole id: `batch/task/run/step/suffix`."""
        return f"{self.batch}/{self.task}/{self.run}/{self.step}/{self.suffix}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Experience:
    """The trainable unit: one turn, or one chain of turns merged into one sequence."""

    eid: EID
    session_id: str
    group_id: str
    tenant: str = "default"
    turn_ids: tuple[str, ...]
    """The turns whose sampled tokens are trained here, in order. [K]"""
    turn_steps: tuple[int, ...]
    """Step of each turn. [K]"""
    tokens: TokenIds
    """Prompt and sampled tokens, including the prompt tokens between turns. [L]"""
    prompt_length: int
    """Number of tokens before the first sampled token."""
    loss_mask: npt.NDArray[np.bool_]
    """True for sampled tokens that are trained. [L]"""
    turn_index: TokenIds
    """Index in `turn_ids` of the turn that sampled the token; -1 for prompt tokens. [L]"""
    logprobs: Logprobs
    """Behaviour logprobs; 0 if `loss_mask` is False. [L]"""
    turn_messages: tuple[Sequence[Json], ...] = ()
    """What the prompt of each turn adds to the reply before it, as messages; empty where it is not known. [K]"""
    routed_experts: npt.NDArray[np.int16] | None = None
    """Experts by layer to which the engine routed each token, -1 where they are not known; None if none is.
    [L, layers, experts a token]"""
    turn_rewards: npt.NDArray[np.float64]
    """Reward of each turn after credit assignment. [K]"""
    turn_own_rewards: npt.NDArray[np.float64]
    """The part of `turn_rewards` that was posted for the turn itself; the rest belongs to its step or session. [K]"""
    turn_returns: npt.NDArray[np.float64]
    """Return of each turn: `turn_rewards` after bonus and discount. [K]"""
    turn_advantages: npt.NDArray[np.float64] | None = None
    """Advantage of each turn in the last update that trained all of them, or the expected one; None if neither is
    known. [K]"""
    reward: float
    """Reward of the whole session."""
    policy_version_first: int
    """Oldest policy version among the turns."""
    policy_version_last: int
    """Newest policy version among the turns."""
    split: Split = Split.TRAIN
    trained_in: tuple[TrainedIn, ...] = ()
    """The updates that trained one of its turns, oldest first."""
    metrics: Json = dataclasses.field(default_factory=dict)
    info: Json = dataclasses.field(default_factory=dict)

    @property
    def own_reward(self) -> float:
        """The reward of these turns: the session's, or step by step the sum of their own."""
        return float(self.turn_rewards.sum()) if self.info.get("credit") == Credit.STEP_WISE else self.reward

    @property
    def group_key(self) -> GroupKey:
        """The key of its group."""
        return self.tenant, self.group_id

    @property
    def session_key(self) -> SessionKey:
        """The key of its session."""
        return self.tenant, self.session_id


def experience_json(experience: Experience) -> Json:
    """Return an experience as the API's JSON; as in Trinity-RFT, mask and logprobs begin after the prompt."""
    after = experience.prompt_length
    return {
        "eid": dataclasses.asdict(experience.eid),
        "session_id": experience.session_id,
        "group_id": experience.group_id,
        "status": experience.info.get("status"),
        "turn_ids": list(experience.turn_ids),
        "turn_steps": list(experience.turn_steps),
        "tokens": experience.tokens.tolist(),
        "prompt_length": after,
        "loss_mask": experience.loss_mask[after:].tolist(),
        "logprobs": [float(value) for value in experience.logprobs[after:]],
        "reward": experience.own_reward,
        "return": experience.turn_returns.tolist(),
        "advantage": None if experience.turn_advantages is None else experience.turn_advantages.tolist(),
        "turn_rewards": experience.turn_rewards.tolist(),
        "turn_own_rewards": experience.turn_own_rewards.tolist(),
        "session_reward": experience.reward,
        "policy_version_first": experience.policy_version_first,
        "policy_version_last": experience.policy_version_last,
        "split": experience.split.value,
        "trained_in": experience.trained_in,
        "metrics": experience.metrics,
        "info": experience.info,
    }
