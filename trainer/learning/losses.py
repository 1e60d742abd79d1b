"""Policy losses: each a short pure function over trained tokens, with its paper.

A loss gives one number a token. How tokens are weighed against each other is data: `weights` sum to one over an
optimizer step. So the result does not depend on which tokens share a row, a micro-batch or a process. Legend: M trained
tokens, S sequences (chains), P pairs. Sign: every loss is minimised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from trainer.learning.corrections import CorrectionRule, correction, importance_gate
from trainer.learning.ratios import TrainedTokens, anchor, ratio_of, sequence_log_ratio, sequence_mean, to_go

Algorithm = Literal["reinforce", "ppo", "gspo", "cispo", "masked_is", "dppo", "sapo", "topr", "sft", "dpo", "custom"]
Estimate = Literal["k1", "k2", "k3"]

BOUNDS: dict[str, tuple[float, float]] = {
    "gspo": (3e-4, 4e-4),
    "cispo": (1.0, 0.5),
    "masked_is": (0.5, 4.0),
}
"""`clip_low` and `clip_high` of an algorithm, where they are not PPO's: those of GSPO's paper; CISPO without a lower
bound; IcePop's [0.5, 5]."""
DPPO_MAX_RATIO = 20.0
"""DPPO: bound of the importance ratio, as in verl."""
WITHOUT_RATIO = {"reinforce", "sft", "dpo"}
"""Algorithms whose loss carries no importance ratio of its own."""


class LossRule(CorrectionRule):
    """Which loss, and its constants."""

    algorithm: Algorithm = "ppo"
    """The policy loss; docs/training.md lists them with their papers."""
    custom_loss: str | None = None
    """For `custom`: `module:function`, which takes the trained tokens and these settings and returns a loss a token."""
    clip_low: float = Field(default=0.2, ge=0)
    """Lower bound of the ratio: 1 − clip_low. Default by algorithm: 3e-4 for gspo, 1 for cispo, 0.5 for masked_is."""
    clip_high: float = Field(default=0.28, ge=0)
    """Upper bound of the ratio: 1 + clip_high; above `clip_low` it is DAPO's clip-higher. Default by algorithm: 4e-4
    for gspo, 0.5 for cispo, 4 for masked_is."""
    dual_clip: float | None = Field(default=3.0, gt=1)
    """PPO: bound of the ratio where the advantage is negative; None turns it off."""
    sapo_temperatures: tuple[float, float] = (1.0, 1.05)
    """SAPO: temperature of the gate for positive and for negative advantages."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the base model. Above 0, full training holds the base model in memory beside the policy;
    LoRA uses its own base."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract it from the advantages: from each token, the KL of all later ones."""
    kl_estimate: Estimate = "k3"
    """Estimate of the KL in the loss."""
    dpo_beta: float = Field(default=0.1, gt=0)
    """DPO's β."""
    dpo_reference: Literal["base", "behaviour"] = "base"
    """DPO's reference policy: the base model, or the policy that sampled."""

    @model_validator(mode="before")
    @classmethod
    def _bounds_by_algorithm(cls, values: Any) -> Any:
        if not isinstance(values, dict) or values.get("algorithm") not in BOUNDS:
            return values
        low, high = BOUNDS[values["algorithm"]]
        return {"clip_low": low, "clip_high": high} | values

    @model_validator(mode="after")
    def _has_custom_loss(self) -> Self:
        if (self.algorithm == "custom") != (self.custom_loss is not None):
            raise ValueError("algorithm='custom' and custom_loss='module:function' belong together")
        return self

    @property
    def needs_proximal(self) -> bool:
        """Whether a correction needs the logprobs at the start of the batch, because the ratio is the loss's own."""
        corrects = self.tis_cap is not None or self.mis_cap is not None
        return corrects and self.algorithm not in WITHOUT_RATIO

    @property
    def reads_no_behaviour(self) -> bool:
        """Whether the loss needs no behaviour logprobs, so that it can train imported conversations."""
        if self.tis_cap is not None or self.mis_cap is not None or self.off_policy_mask is not None:
            return False
        return self.algorithm == "sft" or (self.algorithm == "dpo" and self.dpo_reference == "base")

    @property
    def needs_reference(self) -> bool:
        """Whether a term needs the base model's logprobs."""
        return self.kl_coef > 0 or (self.algorithm == "dpo" and self.dpo_reference == "base")


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return −A log π. Williams 1992 (REINFORCE), section 4; over the tokens of an episode, section 5."""
    return -advantages * logprobs


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float, dual_clip: float | None = None) -> Tensor:
    """Return −min(r A, clip(r, 1 − low, 1 + high) A), and −c A instead where A < 0 and that is smaller.

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7; low < high is clip-higher, Yu et al. 2025 (DAPO,
    arXiv:2503.14476), eq. 10; c is the dual clip, Ye et al. 2020 (arXiv:1912.09729).
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)


def gspo_ratio(logprobs: Tensor, old: Tensor, sequence: Tensor) -> Tensor:
    """Return each token's sequence ratio, the geometric mean over its chain, with the token's own gradient.

    Zheng et al. 2025 (arXiv:2507.18071), eq. 7 for the ratio and eq. 14 for the gradient by token: the value is the
    sequence's, the gradient flows through the token's logprob.
    """
    log_ratio = sequence_mean(logprobs.detach() - old, sequence)
    return ratio_of(logprobs - logprobs.detach() + log_ratio[sequence], torch.zeros_like(old))


def cispo(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return −sg(clip(r)) A log π: the weight is clipped, no token loses its gradient.

    MiniMax 2025 (arXiv:2506.13585), eq. 4 and 5.
    """
    return -ratio.detach().clamp(1 - low, 1 + high) * advantages * logprobs


def masked_importance(logprobs: Tensor, ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return −1[1 − low ≤ r ≤ 1 + high] sg(r) A log π: tokens out of bounds are left out, both ways.

    The mask is that of IcePop (Ling Team 2025, arXiv:2510.18855), which puts it on the ratio between trainer and
    engine and clips the trainer's own ratio as PPO does; here one ratio, to the behaviour, carries both.
    """
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    return -torch.where(inside, ratio.detach(), 0.0) * advantages * logprobs


def dppo(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return −M r A, masked where the *probability* has moved too far and would move on.

    The binary total variation |π − μ| takes the place of the ratio, which punishes rare tokens. Qi et al. 2026,
    "Rethinking the trust region in LLM reinforcement learning" (DPPO, arXiv:2602.04879), the Binary-TV variant. The
    mask does not bound the ratio of rare tokens, so the ratio is truncated, and with it the weight of the gradient.
    """
    blocked = dppo_blocked(logprobs, old, advantages, low, high)
    weight = ratio_of(logprobs, old).detach().clamp(max=DPPO_MAX_RATIO)
    return -torch.where(blocked, 0.0, weight * torch.exp(logprobs - logprobs.detach())) * advantages


def dppo_blocked(logprobs: Tensor, old: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return where DPPO's mask is 0."""
    moved = logprobs.detach().exp() - old.exp()
    return ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < -low))


def sapo(ratio: Tensor, advantages: Tensor, temperatures: tuple[float, float]) -> Tensor:
    """Return −(4 / τ) σ(τ (r − 1)) A: a soft gate in place of the clip, steeper for negative advantages.

    Gao et al. 2025 (SAPO, arXiv:2511.20347).
    """
    positive, negative = temperatures
    tau = torch.where(advantages > 0, positive, negative)
    return -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * advantages


def topr(logprobs: Tensor, log_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Return −w A log π with w = 1 where A > 0 and w = sg(min(ρ, 1)) elsewhere, ρ the ratio of the whole chain.

    Good samples are imitated however old they are, bad ones count as far as the policy would still produce them.
    Le Roux et al. 2025 (TOPR, arXiv:2503.14286). `log_ratio` is each token's log ρ. [M]
    """
    tapered = log_ratio.detach().clamp(max=0.0).exp()
    return -torch.where(advantages > 0, torch.ones_like(tapered), tapered) * advantages * logprobs


def sft(logprobs: Tensor) -> Tensor:
    """Return −log π, behaviour cloning."""
    return -logprobs


def dpo(chosen: Tensor, rejected: Tensor, beta: float) -> Tensor:
    """Return −log σ(β (chosen − rejected)), both as sums of log π − log π_ref.

    Both and the result [P]. Rafailov et al. 2023 (arXiv:2305.18290), eq. 7.
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen - rejected))


def kl(logprobs: Tensor, reference: Tensor, estimate: Estimate) -> Tensor:
    """Return an estimate of KL(π ‖ π_ref) a token, from samples of π. Schulman 2020, "Approximating KL divergence".

    With d = log π_ref − log π: k1 = −d, unbiased; k2 = d²/2; k3 = e^d − d − 1, unbiased and never negative. The
    gradient of the KL is that of k2. The gradient of k1 is zero in expectation, whatever the reference is, so `k1` has
    the value of k1 and the gradient of k2. k3 keeps its own gradient, as in GRPO's paper: that of KL(π_ref ‖ π).
    """
    difference = (reference - logprobs).clamp(-20.0, 20.0)
    k2 = difference.square() / 2
    if estimate == "k1":
        return -difference.detach() + k2 - k2.detach()
    return k2 if estimate == "k2" else torch.expm1(difference) - difference


def kl_in_advantages(tokens: TrainedTokens, coefficient: float) -> Tensor:
    """Return A_t − β Σ_{t' ≥ t} log(π / π_ref)_{t'} over the chain, without gradient: the KL as part of the reward.

    The policy gradient of −β KL over whole chains: each token answers for the divergence from it on.
    """
    divergence = (tokens.logprobs - needed(tokens.reference)).detach()
    return tokens.advantages - coefficient * to_go(divergence, tokens.sequence)


def loss_of(tokens: TrainedTokens, rule: LossRule, custom: Callable[..., Tensor] | None = None) -> Tensor:
    """Return the micro-batch's share of the optimizer step's loss, a scalar.

    Args:
        tokens: The trained tokens.
        rule: The loss and its constants.
        custom: The function behind `custom_loss`.
    """
    if rule.algorithm == "dpo":
        return preference_loss(tokens, rule)
    if rule.kl_coef and rule.kl_in == "reward":
        tokens.advantages = kl_in_advantages(tokens, rule.kl_coef)
    loss_M = (custom or POLICY_LOSSES[rule.algorithm])(tokens, rule)
    loss_M = loss_M * importance_gate(tokens, rule) * _correction(tokens, rule)
    if rule.entropy_coef:
        loss_M = loss_M - rule.entropy_coef * tokens.entropy
    if rule.kl_coef and rule.kl_in == "loss":
        loss_M = loss_M + rule.kl_coef * kl(tokens.logprobs, needed(tokens.reference), rule.kl_estimate)
    return (tokens.weights * loss_M).sum()


def clipped(tokens: TrainedTokens, rule: LossRule) -> Tensor:
    """Return where the algorithm's bound takes effect: the gradient is cut off, or its weight is bounded. [M]."""
    bounded = CLIPPED.get(rule.algorithm)
    with torch.no_grad():
        return torch.zeros_like(tokens.advantages, dtype=torch.bool) if bounded is None else bounded(tokens, rule)


def _ratio(tokens: TrainedTokens) -> Tensor:
    return ratio_of(tokens.logprobs, anchor(tokens))


def _gspo_ratio(tokens: TrainedTokens) -> Tensor:
    return gspo_ratio(tokens.logprobs, anchor(tokens), tokens.sequence)


def _outside(ratio: Tensor, tokens: TrainedTokens, rule: LossRule) -> Tensor:
    """Return where PPO's clip cuts the gradient off."""
    above = (ratio > 1 + rule.clip_high) & (tokens.advantages > 0)
    below = (ratio < 1 - rule.clip_low) & (tokens.advantages < 0)
    return above | below


def _out_of_bounds(tokens: TrainedTokens, rule: LossRule) -> Tensor:
    ratio = _ratio(tokens)
    return (ratio > 1 + rule.clip_high) | (ratio < 1 - rule.clip_low)


POLICY_LOSSES: dict[str, Callable[[TrainedTokens, LossRule], Tensor]] = {
    "reinforce": lambda t, _: reinforce(t.logprobs, t.advantages),
    "ppo": lambda t, rule: ppo_clip(_ratio(t), t.advantages, rule.clip_low, rule.clip_high, rule.dual_clip),
    "gspo": lambda t, rule: ppo_clip(_gspo_ratio(t), t.advantages, rule.clip_low, rule.clip_high),
    "cispo": lambda t, rule: cispo(t.logprobs, _ratio(t), t.advantages, rule.clip_low, rule.clip_high),
    "masked_is": lambda t, rule: masked_importance(t.logprobs, _ratio(t), t.advantages, rule.clip_low, rule.clip_high),
    "dppo": lambda t, rule: dppo(t.logprobs, anchor(t), t.advantages, rule.clip_low, rule.clip_high),
    "sapo": lambda t, rule: sapo(_ratio(t), t.advantages, rule.sapo_temperatures),
    "topr": lambda t, _: topr(
        t.logprobs, sequence_log_ratio(t.logprobs.detach(), t.behaviour, t.sequence), t.advantages
    ),
    "sft": lambda t, _: sft(t.logprobs),
}
"""The loss of each token by the name of its algorithm. [M]"""

CLIPPED: dict[str, Callable[[TrainedTokens, LossRule], Tensor]] = {
    "ppo": lambda t, rule: _outside(_ratio(t), t, rule),
    "gspo": lambda t, rule: _outside(_gspo_ratio(t), t, rule),
    "cispo": _out_of_bounds,
    "masked_is": _out_of_bounds,
    "dppo": lambda t, rule: dppo_blocked(t.logprobs, anchor(t), t.advantages, rule.clip_low, rule.clip_high),
}
"""Where the bound of an algorithm takes effect; those that have none are not here."""


def _correction(tokens: TrainedTokens, rule: LossRule) -> Tensor | float:
    """Return the weight that corrects for the engine; 1 where the loss carries that ratio itself."""
    if tokens.proximal is None and rule.algorithm not in WITHOUT_RATIO:
        return 1.0
    return correction(tokens, rule)


def preference_loss(tokens: TrainedTokens, rule: LossRule) -> Tensor:
    """Return DPO's loss: sum a pair's chains, those of the preferred session apart, and weigh each pair once."""
    pair_S, chosen_S = needed(tokens.pair), needed(tokens.chosen)
    reference = tokens.behaviour if rule.dpo_reference == "behaviour" else needed(tokens.reference)
    pair_M, chosen_M = pair_S[tokens.sequence], chosen_S[tokens.sequence]
    num_pairs = int(pair_S.max()) + 1
    margin_M = tokens.logprobs - reference
    zeros = margin_M.new_zeros(num_pairs)
    chosen = zeros.index_add(0, pair_M, torch.where(chosen_M, margin_M, 0.0))
    rejected = zeros.index_add(0, pair_M, torch.where(chosen_M, 0.0, margin_M))
    weights = zeros.index_add(0, pair_M, tokens.weights)
    return (weights * dpo(chosen, rejected, rule.dpo_beta)).sum()


def needed(tensor: Tensor | None) -> Tensor:
    """Return the tensor, which the batch must have for this loss."""
    assert tensor is not None, "the batch was built without what this loss needs"
    return tensor
