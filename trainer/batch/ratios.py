"""Importance ratios of the trained tokens: weights for another engine or policy, the mask of old bad chains, gauges.

An importance weight multiplies the loss of a token and carries no gradient: for an engine that differs from the
trainer, or for an older version that sampled. Gauges distinguish a run that learns from one that collapses. A gauge is
a ratio of sums. The sums are accumulated over rows and processes and divided once, so a gauge does not depend on how
tokens are distributed over rows. Legend: M trained tokens, S sequences (chains).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainer.world import World
from turnwise.settings import Settings

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here before exp, so that one broken token cannot make the whole loss infinite."""

BY_CHAIN = ("pair", "chosen")
_SUMS = (
    *("tokens", "loss", "entropy", "kl", "ratio", "ratio_squared"),
    *("imported_tokens", "imported_logprobs"),
)
RESERVED = (*_SUMS, "ratio_max", "ratio_mean", "effective_sample_size", "imported_logprob")


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainedTokens:
    """The trained tokens of a micro-batch, whatever rows they lie in."""

    logprobs: Tensor
    """Under the weights that are trained now, with the gradient. [M]"""
    entropy: Tensor
    """Of the next-token distribution, nats. [M]"""
    behaviour: Tensor
    advantages: Tensor
    weights: Tensor
    """Share of the token in the optimizer step; all tokens of the step sum to 1. [M]"""
    sequence: Tensor
    """Index of the chain that the token belongs to, 0 … S − 1; the tokens of a chain are in order. [M]"""
    proximal: Tensor | None = None
    """Under the weights at the start of the batch; None where ratios are taken to `behaviour`. [M]"""
    reference: Tensor | None = None
    """Under the reference policy; None where no term needs it. [M]"""
    values: Tensor | None = None
    """The critic's values under its present weights; carry the gradient. None without a critic. [M]"""
    old_values: Tensor | None = None
    returns: Tensor | None = None
    pair: Tensor | None = None
    """Index of the pair of the chain, 0 … P − 1, where pairs are trained. [S]"""
    chosen: Tensor | None = None
    """True where the chain belongs to the better session of its pair. [S]"""


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    return torch.exp((logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def anchor(tokens: TrainedTokens) -> Tensor:
    return tokens.behaviour if tokens.proximal is None else tokens.proximal


def sequence_log_ratio(logprobs: Tensor, old: Tensor, sequence: Tensor) -> Tensor:
    """Return log π / π_old of each token's whole chain. [M]."""
    return _sums(logprobs - old, sequence)[sequence].clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Return the mean of each chain's tokens. [S]."""
    return _sums(values, sequence) / _sums(torch.ones_like(values), sequence).clamp(min=1)


def to_go(values: Tensor, sequence: Tensor) -> Tensor:
    """Return for each token the sum over itself and the later tokens of its chain. [M]."""
    totals, order = torch.zeros_like(values), torch.argsort(sequence, stable=True)
    ordered, of = values[order], sequence[order]
    reached = ordered.flip(0).cumsum(0).flip(0)
    sums = _sums(values, sequence)
    later = sums.flip(0).cumsum(0).flip(0) - sums  # of all chains behind this one
    totals[order] = reached - later[of]
    return totals


class ImportanceRule(Settings):
    """Which importance weights and masks apply, and their bounds."""

    correction: Literal["tis", "mis", "sequence_tis", "sequence_mis"] | None = None
    """Weigh each token by the ratio between the trainer's weights at the start of a batch and the policy that sampled:
    `tis` truncates the ratio at `correction_cap`, `mis` leaves out what is above it; with `sequence_` it is the ratio
    of the token's whole chain. Ratios of the loss are then taken to the weights at the start of the batch, with one
    more forward pass. None turns it off."""
    correction_cap: float = Field(default=2.0, gt=0)
    """Bound of that ratio."""
    off_policy_mask: float | None = Field(default=None, gt=0)
    """Leave out chains with a negative advantage whose tokens became this much less probable on average, in nats,
    since they were sampled; None turns it off."""


def importance_gate(tokens: TrainedTokens, rule: ImportanceRule) -> Tensor | float:
    """Return 0 for chains with a negative advantage and mean(log μ − log π) > `off_policy_mask`, else 1. [M].

    DeepSeek-AI 2025 (DeepSeek-V3.2, arXiv:2512.02556), off-policy sequence masking.
    """
    if rule.off_policy_mask is None:
        return 1.0
    sequence = tokens.sequence
    moved = sequence_mean(tokens.behaviour - tokens.logprobs.detach(), sequence)[sequence]
    bad = sequence_mean(tokens.advantages, sequence)[sequence] < 0
    return torch.where(bad & (moved > rule.off_policy_mask), 0.0, 1.0)


def importance_weight(tokens: TrainedTokens, rule: ImportanceRule) -> Tensor | float:
    """Return min(ρ, cap) for `tis`, and for `mis` ρ where ρ ≤ cap, else 0. [M].

    `tis`: Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training"; with PPO it is the
    decoupled loss of Hilton et al. 2022 (arXiv:2110.00641). `mis`: Liu et al. 2025, "When speed kills stability:
    demystifying RL collapse from the training-inference mismatch".
    """
    if rule.correction is None:
        return 1.0
    proximal = tokens.logprobs.detach() if tokens.proximal is None else tokens.proximal
    if rule.correction.startswith("sequence_"):
        ratio = sequence_log_ratio(proximal, tokens.behaviour, tokens.sequence).exp()
    else:
        ratio = ratio_of(proximal, tokens.behaviour)
    if rule.correction.endswith("tis"):
        return ratio.clamp(max=rule.correction_cap)
    return torch.where(ratio <= rule.correction_cap, ratio, 0.0)


def _sums(values: Tensor, sequence: Tensor) -> Tensor:
    num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(num_sequences).index_add(0, sequence, values)


class Gauges:
    """Sums over the trained tokens of an optimizer step, or of several."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._sums = dict.fromkeys((*_SUMS, *names), 0.0)
        self._largest_ratio = 0.0
        self._num_steps = 0
        self._observed: list[Tensor] = []
        """The sums of each row, then its largest ratio, on their device until `reduce`: reading would wait for it."""

    def observe(
        self,
        tokens: TrainedTokens,
        loss: Tensor,
        own: Mapping[str, Tensor],
        imported: TrainedTokens | None = None,
    ) -> None:
        """Add the sampled and the imported tokens of a row, and the algorithm's own numbers of the sampled ones."""
        logprobs = tokens.logprobs.detach()
        ratio = ratio_of(logprobs, tokens.behaviour)
        # KL(trainer ‖ behaviour) from the behaviour's samples, in the form whose every term is at least 0.
        kl = ratio * (logprobs - tokens.behaviour) - (ratio - 1)
        added = {
            "tokens": torch.ones_like(ratio).sum(),
            "loss": loss.detach(),
            "entropy": tokens.entropy.detach().sum(),
            "kl": kl.sum(),
            "ratio": ratio.sum(),
            "ratio_squared": ratio.square().sum(),
            "imported_tokens": loss.new_zeros(()),
            "imported_logprobs": loss.new_zeros(()),
            **{name: values.detach().double().sum() for name, values in own.items()},
        }
        if imported is not None:
            added["imported_tokens"] = torch.ones_like(imported.logprobs).sum()
            added["imported_logprobs"] = imported.logprobs.detach().sum()
        largest = ratio.max() if len(ratio) else ratio.new_zeros(())
        self._observed.append(torch.stack([*(added[name].double() for name in self._sums), largest.double()]))

    def reduce(self, world: World) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        none = torch.zeros(1, len(self._sums) + 1, dtype=torch.float64)
        rows = (torch.stack(self._observed) if self._observed else none).to(device)
        sums = world.sum(rows[:, :-1].sum(0))
        self._largest_ratio = float(world.max(rows[:, -1].max()))
        self._observed = []
        self._sums = dict(zip(self._sums, sums.tolist(), strict=True))

    def add(self, other: Gauges) -> None:
        """Add an optimizer step of a batch."""
        self._num_steps += 1
        for name, value in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        self._largest_ratio = max(self._largest_ratio, other._largest_ratio)

    def read(self) -> dict[str, float | int | None]:
        """Return the gauges, of a batch the mean loss of its steps; None where JSON has no number for a value."""
        sums = self._sums
        count = max(sums["tokens"], 1.0)
        found = {
            "tokens": int(sums["tokens"]),
            "loss": sums["loss"] / max(self._num_steps, 1),
            "entropy": sums["entropy"] / count,
            "kl": sums["kl"] / count,
            "ratio_mean": sums["ratio"] / count,
            "ratio_max": self._largest_ratio,
            "effective_sample_size": sums["ratio"] ** 2 / max(sums["ratio_squared"], 1e-12) / count,
        }
        found |= {name: sums[name] / count for name in sums.keys() - set(_SUMS)}
        if imported := int(sums["imported_tokens"]):
            found |= {"imported_tokens": imported, "imported_logprob": sums["imported_logprobs"] / imported}
        return {name: finite(value) for name, value in found.items()}


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
