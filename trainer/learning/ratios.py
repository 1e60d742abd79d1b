"""The trained tokens of a micro-batch, and the importance ratios between the policies that are known for them.

Legend: M trained tokens, S sequences (chains).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log ratios are clamped here before exp, so that one broken token cannot make the whole loss infinite."""

BY_CHAIN = ("pair", "chosen")
"""Columns of `TrainedTokens` with one value per chain."""


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
    """Index of the chain that the token belongs to, 0 … S − 1; the tokens of a chain are in order. [M]"""
    proximal: Tensor | None = None
    """Under the weights at the start of the batch; None where ratios are taken to `behaviour`. [M]"""
    reference: Tensor | None = None
    """Under the reference policy; None where no term needs it. [M]"""
    values: Tensor | None = None
    """The critic's values under its present weights; carry the gradient. None without a critic. [M]"""
    old_values: Tensor | None = None
    """The values at the start of the batch. [M]"""
    returns: Tensor | None = None
    """What the critic learns. [M]"""
    pair: Tensor | None = None
    """For DPO: index of the pair of the chain, 0 … P − 1. [S]"""
    chosen: Tensor | None = None
    """For DPO: True where the chain belongs to the preferred session. [S]"""

    def subset(self, is_in: Tensor) -> TrainedTokens:
        """Return the tokens where `is_in` [M] is True; chains keep their indices."""
        columns = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        by_token = {name: column for name, column in columns.items() if column is not None and name not in BY_CHAIN}
        return dataclasses.replace(self, **{name: column[is_in] for name, column in by_token.items()})


def ratio_of(logprobs: Tensor, old: Tensor) -> Tensor:
    """Return π / π_old a token."""
    return torch.exp((logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))


def anchor(tokens: TrainedTokens) -> Tensor:
    """Return the logprobs that ratios are taken to: the proximal ones where there are any, else the behaviour's."""
    return tokens.behaviour if tokens.proximal is None else tokens.proximal


def sequence_log_ratio(logprobs: Tensor, old: Tensor, sequence: Tensor) -> Tensor:
    """Return log π / π_old of the whole chain that each token belongs to. [M]."""
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


def _sums(values: Tensor, sequence: Tensor) -> Tensor:
    num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(num_sequences).index_add(0, sequence, values)
