"""GAE: a critic values the state before each token; on which token a reward falls, and advantages token by token.

Each chain is one trajectory: what follows a trained token is the next trained token of its own chain, also where
several chains share the token's prefix. Prompt tokens between two turns belong to the environment and are no states.
Legend: M trained tokens of a batch, T of a chain.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from trainer.algorithms.algorithm import Scorer, needed
from trainer.algorithms.grpo import GRPO
from trainer.batch.advantages import PastValues, whiten
from trainer.batch.batch import Batch, Reals
from trainer.batch.chain import Chain
from trainer.batch.forest import Indices
from trainer.batch.ratios import TrainedTokens
from trainer.batch.selection import Selection
from turnwise.credit import Floats
from turnwise.types import Json

VALUE_CLIP = 0.2
"""How far a value may move from that at the start of the batch before its gradient is cut off."""


class GAE(GRPO):
    """Generalized Advantage Estimation, with PPO's clip. Schulman et al. 2016 (arXiv:1506.02438)."""

    name = "gae"
    needs_values = True
    credits_tokens = True
    compares_singles = False

    class Settings(GRPO.Settings):
        gae_lambda: float = Field(default=1.0, ge=0, le=1)
        """λ a token: 1 compares the whole return with the value, smaller ones trust the critic more."""
        value_coef: float = Field(default=0.5, gt=0)
        """Weight of the value loss."""
        critic_learning_rate: float | None = Field(default=None, gt=0)
        """Learning rate of the critic's own weights, constant over the run. None: ten times `learning_rate`."""

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.critic_rate = settings.critic_learning_rate

    def assign(self, offer: Selection, past: PastValues) -> list[Floats]:  # noqa: ARG002
        return [np.zeros(len(experience.turn_ids)) for experience in offer.offered]

    def credit(self, batch: Batch, members: Sequence[int], scorer: Scorer) -> tuple[Batch, Json]:
        return with_values(batch, members, scorer.column_of("values", batch, members), self.settings)

    def critic_loss(self, tokens: TrainedTokens) -> Tensor:
        values, old, returns = needed(tokens.values), needed(tokens.old_values), needed(tokens.returns)
        return self.settings.value_coef * value_loss(values, old, returns)


def gae(rewards: Floats, values: Floats, lam: float) -> Floats:
    """Return A_t = δ_t + λ A_{t+1} with δ_t = r_t + V_{t+1} − V_t; nothing follows the last state. [T].

    Tokens are not discounted (γ = 1): the length of a reply is no delay of its reward.

    Schulman et al. 2016 (arXiv:1506.02438), eq. 11 and 16.
    """
    advantages = np.zeros_like(values)
    following, later = 0.0, 0.0
    for t in reversed(range(len(values))):
        later = rewards[t] + following - values[t] + lam * later
        advantages[t], following = later, values[t]
    return advantages


def token_rewards(experience: Chain, places: Indices) -> Floats:
    """Return the reward after each of a chain's trained tokens, which lie at these places. [T].

    With step-wise credit a turn's own reward follows its last token, and the reward of a step follows the step's last
    turn. Otherwise the session's reward follows the chain. The reward of a turn that is not trained follows the trained
    token before it.
    """
    rewards = np.zeros(len(places))
    if not len(places):
        return rewards
    if not experience.is_by_step:
        rewards[-1] = experience.reward
        return rewards
    after_turn = experience.turn_own_rewards.copy()
    last_of_step = list({step: turn for turn, step in enumerate(experience.turn_steps)}.values())
    after_turn[last_of_step] = experience.turn_rewards[last_of_step]
    turns = experience.turn_index[places]
    for turn, reward in enumerate(after_turn):
        until = int(np.searchsorted(turns, turn, side="right"))
        if until:
            rewards[until - 1] += reward
    return rewards


def with_values(batch: Batch, members: Sequence[int], values: Reals, rule: GAE.Settings) -> tuple[Batch, Json]:
    """Return the batch with GAE's advantages, normalised over the members' tokens, returns and values; and gauges.

    `values` are those of each trained token; those of other experiences are not read. [M]
    """
    raw, advantages = np.zeros(len(values)), np.zeros(len(values))
    for member in members:
        tokens = batch.tokens_of[member]
        rewards = token_rewards(batch.experiences[member], batch.table.place[tokens])
        raw[tokens] = gae(rewards, values[tokens].astype(np.float64), rule.gae_lambda)
    trained = np.concatenate([batch.tokens_of[member] for member in members])
    advantages[trained] = whiten(raw[trained], ddof=0)
    returns = raw + values
    table = dataclasses.replace(
        batch.table, advantages=advantages.astype(np.float32), values=values, returns=returns.astype(np.float32)
    )
    gauges = {
        "value_mean": float(np.mean(values[trained])),
        "value_loss": float(np.mean(raw[trained] ** 2) / 2),
        "value_explained_variance": explained_variance(values[trained], returns[trained]),
    }
    return dataclasses.replace(batch, table=table), gauges


def explained_variance(values: npt.NDArray[np.floating], returns: Floats) -> float | None:
    """Return 1 − Var(R − V) / Var(R); None where all returns are equal."""
    spread = float(np.var(returns))
    return None if spread == 0 else 1 - float(np.var(returns - values)) / spread


def value_loss(values: Tensor, old: Tensor, returns: Tensor) -> Tensor:
    """Return max((V − R)², (clip(V, V_old ± ε) − R)²) / 2 a token. [M].

    The clip is that of PPO's implementations (Huang et al. 2022, "The 37 implementation details of PPO", detail 9).
    """
    bounded = old + (values - old).clamp(-VALUE_CLIP, VALUE_CLIP)
    return torch.maximum((values - returns).square(), (bounded - returns).square()) / 2
