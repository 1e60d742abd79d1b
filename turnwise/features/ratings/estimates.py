"""What a version's sessions are worth by the ratings alone, beside what the head says, and whether the two disagree.

Only sessions that a person was asked about count, each weighted by one over its probability of being asked: that mean
is right whatever the head predicts. A session judges the version that sampled it and trains later ones, so no rating
judges what it has trained.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from turnwise.features.ratings import head
from turnwise.features.ratings.rated import RatedSession, RatingSource
from turnwise.features.statistics import intervals
from turnwise.features.statistics.confidence import AnyTime, Looks
from turnwise.features.statistics.intervals import Interval

CONFIDENCE = Looks(alpha=0.1)
"""An interval of a version's ratings holds with 90 %."""
OVERRATED = AnyTime(alpha=0.1, narrowest_at=20)
"""The head is compared with every rating that comes, so its bound holds at all times."""
LEAST_OVERRATED = 8
NUM_NAMED = 3
LEAST = 2
"""Ratings that an interval needs; with two ghosts it is honest from then on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VersionReward:
    """What the sessions of a version are worth, by those who were asked and by the head."""

    policy_version: int
    num_sessions: int
    num_rated: int
    """Sessions that a person was asked about and has rated."""
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    """The mean rating, weighted by the probability of being asked, and its 90 % interval; null for fewer than two."""
    num_predicted: int = 0
    predicted: float | None = None
    """The mean of what the head predicted of the version's sessions, of rated ones without their rating."""


def of_versions(known: Sequence[RatedSession]) -> list[VersionReward]:
    """Return what each version of a policy is worth, newest first."""
    by_version: dict[int, list[RatedSession]] = defaultdict(list)
    for one in known:
        by_version[one.policy_version].append(one)
    found = []
    for version, own in sorted(by_version.items(), reverse=True):
        asked = [one for one in own if one.source is RatingSource.ASKED]
        guesses = [one.predicted for one in own if one.predicted is not None]
        interval = true_reward(asked)
        found.append(
            VersionReward(
                policy_version=version,
                num_sessions=len(own),
                num_rated=len(asked),
                mean=None if interval is None else interval.mean,
                low=None if interval is None else interval.low,
                high=None if interval is None else interval.high,
                num_predicted=len(guesses),
                predicted=statistics.fmean(guesses) if guesses else None,
            )
        )
    return found


def auroc(known: Sequence[RatedSession]) -> float | None:
    """Return how well what the head predicted before the ratings ranks the sessions that people were asked about.

    0.5 is chance; None where they liked all of them or none, or where nothing was predicted.
    """
    asked = [one for one in known if one.source is RatingSource.ASKED and one.predicted is not None]
    return head.auroc([one.rating or 0.0 for one in asked], [one.predicted or 0.0 for one in asked])


def true_reward(asked: Sequence[RatedSession]) -> Interval | None:
    """Return the mean reward of all sessions that these were drawn from; None for fewer than `LEAST`.

    Hájek's ratio Σ r/p / Σ 1/p. Its error is that of the mean of n · (r − ratio)/p / Σ 1/p (Särndal et al. 1992,
    "Model assisted survey sampling", 5.7), each over one minus its share of the weights, as the jackknife has it. Two
    ghosts at the bounds keep it from trusting a few equal ratings.
    """
    rated = [(one.rating, one.probability) for one in asked if one.rating is not None and one.probability]
    if len(rated) < LEAST:
        return None
    rewards = np.array([rating for rating, _ in rated])
    weights = 1 / np.array([probability for _, probability in rated])
    weights *= len(weights) / weights.sum()
    ratio = float((weights * rewards).mean())
    bounds = min(0.0, float(rewards.min())), max(1.0, float(rewards.max()))
    residuals = weights * (rewards - ratio) / (1 - weights / len(weights))
    return intervals.mean(ratio + residuals - residuals.mean(), CONFIDENCE, bounds)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Overrated:
    """A version of which the head says more than the asked do, while both have moved apart."""

    predicted: float
    """The mean prediction of the version's rated sessions, made without their ratings."""
    rated: float
    session_ids: tuple[str, ...]
    """The most overrated ones."""


def overrated(known: Sequence[RatedSession], version: int, bound: float) -> Overrated | None:
    """Return by what a version is overrated whose predictions are certainly more than `bound` above its ratings.

    The head may be wrong by its own standard deviation, alike in all sessions: after ten ratings it knows little.
    The version is looked at alone, and with the version before it. The head must also have risen since the versions
    before, and the ratings fallen: a head that is wrong from the start is no policy that has found out what it likes.
    """
    asked = [one for one in known if one.source is RatingSource.ASKED]
    for since in (version, version - 1):
        before = [one for one in known if one.policy_version < since]
        now = [one for one in asked if since <= one.policy_version <= version and one.predicted is not None]
        if len(now) < LEAST_OVERRATED:
            continue
        unsure = statistics.fmean(one.deviation or 0.0 for one in now)
        if not intervals.mean(list(map(_over, now)), OVERRATED).is_above(bound + unsure):
            continue
        predicted, rating = (statistics.fmean(getattr(one, name) for one in now) for name in ("predicted", "rating"))
        earlier = [one.predicted for one in before if one.predicted is not None]
        was = true_reward([one for one in before if one.source is RatingSource.ASKED])
        if earlier and was is not None and predicted > statistics.fmean(earlier) and rating < was.mean:
            worst = sorted(now, key=_over, reverse=True)[:NUM_NAMED]
            return Overrated(predicted=predicted, rated=rating, session_ids=tuple(one.session_id for one in worst))
    return None


def _over(one: RatedSession) -> float:
    return (one.predicted or 0.0) - (one.rating or 0.0)
