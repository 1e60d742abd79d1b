"""Gauges of an optimizer step, which distinguish a run that learns from one that collapses.

A gauge is a ratio of sums. The sums are accumulated over rows and processes and divided once, so a gauge does not
depend on how tokens are distributed over rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainer.learning.ratios import TrainedTokens, ratio_of
from trainer.parallel import World

_SUMS = (
    *("tokens", "loss", "entropy", "kl", "ratio", "ratio_squared"),
    *("imported_tokens", "imported_logprobs"),
)
_MAXIMA = ("ratio_max",)
RESERVED = (*_SUMS, *_MAXIMA, "ratio_mean", "effective_sample_size", "imported_logprob")
"""Names that an algorithm's own gauges cannot have."""


class Gauges:
    """Sums over the trained tokens of an optimizer step, or of several."""

    def __init__(self, names: Sequence[str] = ()) -> None:
        """`names`: the algorithm's own gauges, the same in all processes."""
        self._sums = dict.fromkeys((*_SUMS, *names), 0.0)
        self._maxima = dict.fromkeys(_MAXIMA, 0.0)
        self._observed: list[Tensor] = []
        """Sums and maxima of rows, on their device until `reduce`: reading one would wait for the device."""

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
            "ratio_max": _largest(ratio),
            **{name: values.detach().double().sum() for name, values in own.items()},
        }
        if imported is not None:
            added["imported_tokens"] = torch.ones_like(imported.logprobs).sum()
            added["imported_logprobs"] = imported.logprobs.detach().sum()
        self._observed.append(torch.stack([added[name].double() for name in (*self._sums, *_MAXIMA)]))

    def reduce(self, world: World) -> None:
        """Add all rows, and the other processes' tokens."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        rows = (
            torch.stack(self._observed) if self._observed else torch.zeros(1, len(self._sums) + len(_MAXIMA)).double()
        )
        rows = rows.to(device)
        sums = world.sum(rows[:, : len(self._sums)].sum(0))
        maxima = world.max(rows[:, len(self._sums) :].max(0).values)
        self._observed = []
        self._sums = dict(zip(self._sums, sums.tolist(), strict=True))
        self._maxima = dict(zip(_MAXIMA, maxima.tolist(), strict=True))

    def add(self, other: Gauges) -> None:
        """Add another optimizer step's sums."""
        for name, value in other._sums.items():
            self._sums[name] = self._sums.get(name, 0.0) + value
        for name in _MAXIMA:
            self._maxima[name] = max(self._maxima[name], other._maxima[name])

    def read(self) -> dict[str, float | int | None]:
        """Return the gauges; None where a value is not finite, since JSON has no such number."""
        sums = self._sums
        count = max(sums["tokens"], 1.0)
        found = {
            "tokens": int(sums["tokens"]),
            "loss": sums["loss"],
            "entropy": sums["entropy"] / count,
            "kl": sums["kl"] / count,
            "ratio_mean": sums["ratio"] / count,
            "ratio_max": self._maxima["ratio_max"],
            "effective_sample_size": sums["ratio"] ** 2 / max(sums["ratio_squared"], 1e-12) / count,
        }
        found |= {name: sums[name] / count for name in sums.keys() - set(_SUMS)}
        if imported := int(sums["imported_tokens"]):
            found |= {"imported_tokens": imported, "imported_logprob": sums["imported_logprobs"] / imported}
        return {name: finite(value) for name, value in found.items()}


def _largest(values: Tensor) -> Tensor:
    """Return the maximum; 0 of no values, as in a row of imported chains alone."""
    return values.max() if len(values) else values.new_zeros(())


def finite(value: float | None) -> float | None:
    """Return the value, or None in place of a NaN or an infinity."""
    return value if value is not None and math.isfinite(value) else None
