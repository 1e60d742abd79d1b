"""Policy losses, each a short pure function over trained tokens, with its paper.

A loss gives one number a token, and how tokens are weighed against each other is data: `weights` sum to
one over an optimizer step. So the result does not depend on which tokens share a row, a micro-batch or a process,
and each function stays the formula of its paper. Legend: M trained tokens, S sequences (chains), P pairs.
Sign: every loss is minimised.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from turnwise.settings import Settings

Algorithm = Literal["reinforce", "ppo", "gspo", "cispo", "masked_is", "dppo", "sft", "dpo"]
Estimate = Literal["k1", "k2", "k3"]

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here before exp, so that one broken token cannot make the whole loss infinite."""


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainedTokens:
    """The trained tokens of a micro-batch, whatever rows they lie in."""

    logprobs: Tensor
    """Under the weights that are trained now; carries the gradient. [M]"""
    entropy: Tensor
    """Of the next-token distribution, nats. [M]"""
    behaviour: Tensor
    """Captured when the token was sampled. [M]"""
    advantages: Tensor
    """[M]"""
    weights: Tensor
    """Share of the token in the optimizer step; all tokens of the step sum to 1. [M]"""
    sequence: Tensor
    """Index of the chain that the token belongs to, 0 … S − 1. [M]"""
    proximal: Tensor | None = None
    """Under the weights at the start of the batch; None where ratios are taken to `behaviour`. [M]"""
    reference: Tensor | None = None
    """Under the reference policy; None where no term needs it. [M]"""
    pair: Tensor | None = None
    """For DPO: index of the pair of the chain, 0 … P − 1. [S]"""
    chosen: Tensor | None = None
    """For DPO: True where the chain belongs to the preferred session. [S]"""


class LossRule(Settings):
    """Which loss, and its constants."""

    algorithm: Algorithm = "ppo"
    clip_low: float = Field(default=0.2, ge=0)
    """Lower bound of the ratio: 1 − clip_low."""
    clip_high: float = Field(default=0.28, ge=0)
    """Upper bound of the ratio: 1 + clip_high. Above `clip_low` it is DAPO's clip-higher. GSPO wants both near 4e-4,
    CISPO and masked_is wider ones."""
    tis_cap: float | None = Field(default=None, gt=0)
    """Cap of truncated importance sampling; None turns it off."""
    entropy_coef: float = 0.0
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL to the base model. Above 0, full training holds the base model in memory beside the policy;
    LoRA uses its own base."""
    kl_estimate: Estimate = "k3"
    dpo_beta: float = Field(default=0.1, gt=0)


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Return −A log π. Williams 1992 (REINFORCE), section 4; over the tokens of an episode, section 5."""
    return -advantages * logprobs


def ppo_clip(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    """Return −min(r A, clip(r, 1 − low, 1 + high) A).

    Schulman et al. 2017 (arXiv:1707.06347), eq. 7; low < high is clip-higher, Yu et al. 2025 (DAPO,
    arXiv:2503.14476), eq. 10.
    """
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def gspo_ratio(logprobs: Tensor, old: Tensor, sequence: Tensor) -> Tensor:
    """Return each token's sequence ratio, the geometric mean over its chain, with the token's own gradient.

    Zheng et al. 2025 (arXiv:2507.18071), eq. 7 for the ratio and eq. 14 for the gradient by token: the value is the
    sequence's, the gradient flows through the token's logprob.
    """
    log_ratio = _sequence_mean(logprobs.detach() - old, sequence)
    return torch.exp((logprobs - logprobs.detach() + log_ratio[sequence]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


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
    "Rethinking the trust region in LLM reinforcement learning" (DPPO, arXiv:2602.04879), the Binary-TV variant.
    """
    moved = logprobs.detach().exp() - old.exp()
    blocked = ((advantages > 0) & (moved > high)) | ((advantages < 0) & (moved < -low))
    return -torch.where(blocked, 0.0, ratio_of(logprobs, old)) * advantages


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

    With d = log π_ref − log π: k1 = −d, unbiased; k2 = d²/2, its gradient is the KL's; k3 = e^d − d − 1, unbiased and
    never negative.
    """
    difference = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if estimate == "k1":
        return -difference
    if estimate == "k2":
        return difference.square() / 2
    return torch.expm1(difference) - difference


def truncated_importance(proximal: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Return min(π_prox / μ, cap), without gradient: corrects for an engine that is not quite the trainer.

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; with PPO it is the
    decoupled loss of Hilton et al. 2022 (arXiv:2110.00641).
    """
    return ratio_of(proximal, behaviour).detach().clamp(max=cap)


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return π / π_old a token."""
    return torch.exp((logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def loss_of(tokens: TrainedTokens, rule: LossRule) -> Tensor:
    """Return the micro-batch's share of the optimizer step's loss, a scalar."""
    if rule.algorithm == "dpo":
        return _preference_loss(tokens, rule)
    loss_M = POLICY_LOSSES[rule.algorithm](tokens, rule)
    if rule.tis_cap is not None:
        proximal = tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
        loss_M = loss_M * truncated_importance(proximal, tokens.behaviour, rule.tis_cap)
    if rule.entropy_coef:
        loss_M = loss_M - rule.entropy_coef * tokens.entropy
    if rule.kl_coef:
        loss_M = loss_M + rule.kl_coef * kl(tokens.logprobs, _needed(tokens.reference), rule.kl_estimate)
    return (tokens.weights * loss_M).sum()


def anchor(tokens: TrainedTokens) -> Tensor:
    """Return the logprobs that ratios are taken to: the proximal ones where there are any, else the behaviour's."""
    return tokens.behaviour if tokens.proximal is None else tokens.proximal


def _ratio(tokens: TrainedTokens) -> Tensor:
    return ratio_of(tokens.logprobs, anchor(tokens))


POLICY_LOSSES: dict[str, Callable[[TrainedTokens, LossRule], Tensor]] = {
    "reinforce": lambda t, _: reinforce(t.logprobs, t.advantages),
    "ppo": lambda t, rule: ppo_clip(_ratio(t), t.advantages, rule.clip_low, rule.clip_high),
    "gspo": lambda t, rule: ppo_clip(
        gspo_ratio(t.logprobs, anchor(t), t.sequence), t.advantages, rule.clip_low, rule.clip_high
    ),
    "cispo": lambda t, rule: cispo(t.logprobs, _ratio(t), t.advantages, rule.clip_low, rule.clip_high),
    "masked_is": lambda t, rule: masked_importance(t.logprobs, _ratio(t), t.advantages, rule.clip_low, rule.clip_high),
    "dppo": lambda t, rule: dppo(t.logprobs, anchor(t), t.advantages, rule.clip_low, rule.clip_high),
    "sft": lambda t, _: sft(t.logprobs),
}
"""The loss of each token by the name of its algorithm. [M]"""


def _preference_loss(tokens: TrainedTokens, rule: LossRule) -> Tensor:
    """Sum a pair's chains, the preferred session's apart from the other's, and weigh each pair once."""
    pair_S, chosen_S = _needed(tokens.pair), _needed(tokens.chosen)
    reference = tokens.behaviour if tokens.reference is None else tokens.reference
    pair_M, chosen_M = pair_S[tokens.sequence], chosen_S[tokens.sequence]
    num_pairs = int(pair_S.max()) + 1
    margin_M = tokens.logprobs - reference
    zeros = margin_M.new_zeros(num_pairs)
    chosen = zeros.index_add(0, pair_M, torch.where(chosen_M, margin_M, 0.0))
    rejected = zeros.index_add(0, pair_M, torch.where(chosen_M, 0.0, margin_M))
    weights = zeros.index_add(0, pair_M, tokens.weights)
    return (weights * dpo(chosen, rejected, rule.dpo_beta)).sum()


def _sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Return the mean of each sequence's tokens."""
    num_sequences = int(sequence.max()) + 1
    sums = values.new_zeros(num_sequences).index_add(0, sequence, values)
    counts = values.new_zeros(num_sequences).index_add(0, sequence, torch.ones_like(values))
    return sums / counts.clamp(min=1)


def _needed(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the batch was built without what this loss needs"
    return tensor
