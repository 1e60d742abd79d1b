"""A policy's head: which reward a person would give a session, and how sure that is.

A Bayesian logistic regression with a normal prior, by Laplace's approximation (MacKay 1992): Newton's steps to the one
maximum, and there the inverse of the Hessian as the covariance of the weights. There is nothing to tune on so few
ratings, it takes milliseconds, and the same ratings give the same bits. The features are what the trainer's forward
pass has of a session; how long it is, is left out, because a policy finds that first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Reals: TypeAlias = npt.NDArray[np.float64]

NUM_DIRECTIONS = 16
"""Principal directions of the last token's states that are features."""
PRECISION = 1.0
"""Of the prior of each weight: features have a deviation of 1."""
PRECISION_OF_BIAS = 0.01
MAX_STEPS = 100
FOLDS = 5
PRECISE = 1e-10


@dataclasses.dataclass(frozen=True, slots=True)
class Features:
    """Sessions as the head sees them."""

    states: Reals
    """Of the last token, at two thirds of the model's depth. [N, H]"""
    signals: Reals
    """What else is known of a session. [N, S]; NaN where a signal is not known of one."""

    def of(self, chosen: npt.NDArray[np.bool_]) -> Features:
        """Return those of some sessions."""
        return Features(self.states[chosen], self.signals[chosen])


@dataclasses.dataclass(frozen=True, slots=True)
class Space:
    """How features become the columns of the regression: fixed by the sessions that were seen, rated or not."""

    centre: Reals
    """[H]"""
    directions: Reals
    """[H, D]; each one is divided by the deviation of the states along it."""
    means: Reals
    """[S]"""
    deviations: Reals
    """[S]; 0 for a signal that never varies."""

    @classmethod
    def of(cls, seen: Features, num_directions: int = NUM_DIRECTIONS) -> Space:
        """Return the space of these sessions: principal directions by the smaller of the two Gram matrices."""
        centre = seen.states.mean(0) if len(seen.states) else np.zeros(seen.states.shape[1])
        centred = seen.states - centre
        num = max(0, min(num_directions, len(centred) - 1, centred.shape[1]))
        values, vectors = np.linalg.eigh(centred @ centred.T)
        kept = values[::-1][:num]
        kept = kept[kept > 1e-9 * max(float(values[-1]) if len(values) else 0.0, 1e-300)]
        towards = vectors[:, ::-1][:, : len(kept)]
        # A column along v has the variance value / (N − 1).
        directions = centred.T @ towards / kept * math.sqrt(max(1, len(centred) - 1))
        # The sign of an eigenvector is arbitrary: the largest part is positive.
        largest = np.abs(directions).argmax(0) if directions.size else np.zeros(0, int)
        signs = np.sign(directions[largest, np.arange(directions.shape[1])])
        known = np.isfinite(seen.signals)
        counts = np.maximum(1, known.sum(0))
        filled = np.where(known, seen.signals, 0.0)
        means = filled.sum(0) / counts
        spread = np.where(known, seen.signals - means, 0.0)
        return cls(centre, directions * signs, means, np.sqrt((spread**2).sum(0) / counts))

    def columns(self, features: Features) -> Reals:
        """Return the columns: a one, the states along the directions, the signals. What is not known is average."""
        along = (features.states - self.centre) @ self.directions
        usable = self.deviations > 1e-12
        scaled = (features.signals - self.means)[:, usable] / self.deviations[usable]
        known = np.where(np.isfinite(scaled), scaled, 0.0)
        return np.hstack([np.ones((len(features.states), 1)), along, known])


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """A fitted head."""

    space: Space
    weights: Reals
    """[1 + D + S]"""
    covariance: Reals
    """Of the weights. [1 + D + S, 1 + D + S]"""

    def predict(self, features: Features) -> tuple[Reals, Reals]:
        """Return the probability of a good rating of each session, and its standard deviation, each as [N].

        The mean of σ over the normal distribution of the logit by MacKay's κ, and its deviation by the delta method.
        """
        columns = self.space.columns(features)
        logits = columns @ self.weights
        variances = np.einsum("nc,cd,nd->n", columns, self.covariance, columns)
        means = _logistic(logits / np.sqrt(1 + math.pi * variances / 8))
        slopes = means * (1 - means)
        return means, np.minimum(slopes * np.sqrt(variances), np.sqrt(slopes))


def fit(rated: Features, ratings: Sequence[float] | Reals, space: Space | None = None) -> Head:
    """Fit a head to the ratings of sessions, each from 0 to 1; a space may be that of these and of unrated ones.

    Raises:
        ValueError: a rating is not from 0 to 1, or there is none.
    """
    wanted = np.asarray(ratings, np.float64)
    if not len(wanted) or not ((wanted >= 0) & (wanted <= 1)).all():
        raise ValueError(f"a head needs ratings from 0 to 1, not {wanted.tolist()!r:.80}")
    space = space or Space.of(rated)
    columns = space.columns(rated)
    weights, hessian = _maximum(columns, wanted)
    covariance: Reals = np.linalg.inv(hessian).astype(np.float64)
    return Head(space, weights, covariance)


def _maximum(columns: Reals, wanted: Reals) -> tuple[Reals, Reals]:
    """Return the weights of the greatest posterior probability, and the Hessian of its negative logarithm there."""
    precisions = np.full(columns.shape[1], PRECISION)
    precisions[0] = PRECISION_OF_BIAS
    weights = np.zeros(columns.shape[1])
    for _ in range(MAX_STEPS):
        gradient, hessian = _derivatives(columns, wanted, precisions, weights)
        step = np.linalg.solve(hessian, gradient)
        size, before = 1.0, loss(columns, wanted, precisions, weights)
        while size > 1e-6 and loss(columns, wanted, precisions, weights - size * step) > before:
            size /= 2
        weights = weights - size * step
        if float(gradient @ step) < PRECISE:
            break
    return weights, _derivatives(columns, wanted, precisions, weights)[1]


def loss(columns: Reals, wanted: Reals, precisions: Reals, weights: Reals) -> float:
    """Return the negative logarithm of the posterior probability, but for a constant."""
    logits = columns @ weights
    return float((np.logaddexp(0, logits) - wanted * logits).sum() + (precisions * weights**2).sum() / 2)


def _derivatives(columns: Reals, wanted: Reals, precisions: Reals, weights: Reals) -> tuple[Reals, Reals]:
    means = _logistic(columns @ weights)
    gradient = columns.T @ (means - wanted) + precisions * weights
    hessian = (columns.T * (means * (1 - means))) @ columns + np.diag(precisions)
    return gradient, hessian


def _logistic(logits: Reals) -> Reals:
    shares: Reals = np.exp(-np.logaddexp(0, -logits))
    return shares


def auroc(ratings: Sequence[float] | Reals, predicted: Sequence[float] | Reals) -> float | None:
    """Return the probability that a good session is predicted above a bad one, ties half; None without both kinds."""
    good = np.asarray(ratings, np.float64) > 0.5
    values = np.asarray(predicted, np.float64)
    above, below = values[good], values[~good]
    if not len(above) or not len(below):
        return None
    return float(np.mean((above[:, None] > below) + (above[:, None] == below) / 2))


def shuffled(
    rated: Features, ratings: Sequence[float] | Reals, space: Space, *, seed: int = 0, repeats: int = 5
) -> float | None:
    """Return the mean AUROC, on every fifth session, of heads fitted to ratings that are shuffled; about 0.5.

    More than that shows that the check itself leaks: the head would find what is not there.
    """
    wanted, rng = np.asarray(ratings, np.float64), np.random.default_rng(seed)
    found = [left_out(rated, rng.permutation(wanted), space) for _ in range(repeats)]
    known = [each for each in found if each is not None]
    return sum(known) / len(known) if known else None


def left_out(rated: Features, ratings: Sequence[float] | Reals, space: Space) -> float | None:
    """Return the AUROC of the head on ratings that it was not fitted to, each left out once."""
    wanted = np.asarray(ratings, np.float64)
    predicted = np.full(len(wanted), np.nan)
    for fold in range(FOLDS):
        out = np.arange(len(wanted)) % FOLDS == fold
        if out.all() or not out.any():
            continue
        own = fit(rated.of(~out), wanted[~out], space)
        # Without the bias: it is higher the fewer good sessions are left out, which alone would rank them wrongly.
        predicted[out] = space.columns(rated.of(out))[:, 1:] @ own.weights[1:]
    known = np.isfinite(predicted)
    return auroc(wanted[known], predicted[known])
