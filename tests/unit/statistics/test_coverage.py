"""How often the truth lies in an interval, by simulation: bounded and skewed rewards, few and many, one look and many.

The quick form draws a hundred times; `make test-all` draws a thousand, at each of the sizes.
"""

import functools
import math
from collections.abc import Callable

import numpy as np
import pytest

from turnwise.features.statistics import intervals
from turnwise.features.statistics.confidence import AnyTime, Confidence, Looks, spent, student
from turnwise.features.statistics.intervals import Interval
from turnwise.features.statistics.off_policy import Change, change, surprise_of

ALPHA = 0.1
UNIT = (0.0, 1.0)
Draw = Callable[[np.random.Generator, int], np.ndarray]
REWARDS: dict[str, tuple[Draw, float, tuple[float, float] | None]] = {
    "even": (lambda g, n: (g.random(n) < 0.5).astype(float), 0.5, UNIT),
    "rare": (lambda g, n: (g.random(n) < 0.05).astype(float), 0.05, UNIT),
    "parts": (lambda g, n: g.beta(0.3, 3, n), 0.3 / 3.3, UNIT),
    "unbounded": (lambda g, n: g.lognormal(0, 0.75, n), math.exp(0.75**2 / 2), None),
}
SIZES = [
    pytest.param(8, 100),
    pytest.param(64, 100),
    *(pytest.param(num, 1000, marks=pytest.mark.slow) for num in (8, 20, 64, 300, 2000)),
]


def holds(interval: Interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high


def coverage(num_draws: int, draw: Callable[[np.random.Generator], bool]) -> float:
    generator = np.random.default_rng(7)
    return float(np.mean([draw(generator) for _ in range(num_draws)]))


def least(num_draws: int, nominal: float = 1 - ALPHA) -> float:
    """Three standard errors of a simulation below the nominal coverage."""
    return nominal - 3 * math.sqrt(nominal * (1 - nominal) / num_draws)


@pytest.mark.parametrize(("num", "num_draws"), SIZES)
@pytest.mark.parametrize("kind", REWARDS)
def test_the_interval_of_a_mean_and_of_a_difference_covers_at_one_look(kind, num, num_draws):
    """Skewed values without bounds are the exception: the mean of a few of them covers 0.85 at nominal 0.9."""
    draw, truth, bounds = REWARDS[kind]
    looks = Looks(ALPHA)
    of_mean = coverage(num_draws, lambda g: holds(intervals.mean(draw(g, num), looks, bounds), truth))
    of_both = coverage(
        num_draws, lambda g: holds(intervals.difference(draw(g, num), draw(g, 2 * num), looks, bounds), 0.0)
    )
    assert of_mean >= least(num_draws, 0.9 if bounds else 0.84)
    assert of_both >= least(num_draws)


@pytest.mark.parametrize(("num", "num_draws"), SIZES)
@pytest.mark.parametrize("kind", REWARDS)
def test_an_interval_for_all_times_covers_at_every_look(kind, num, num_draws):
    draw, truth, bounds = REWARDS[kind]
    looks = np.unique(np.geomspace(8, num, 20).astype(int))

    def always(generator: np.random.Generator) -> bool:
        values = draw(generator, num)
        return all(holds(intervals.mean(values[:look], AnyTime(ALPHA), bounds), truth) for look in looks)

    assert coverage(num_draws, always) >= least(num_draws)


@pytest.mark.parametrize("confidence", [Looks(ALPHA), AnyTime(ALPHA)])
@pytest.mark.parametrize(("num", "num_draws"), SIZES)
@pytest.mark.parametrize("truth", [0.02, 0.5, 0.97])
def test_the_interval_of_a_share_covers(truth, num, num_draws, confidence):
    of = functools.cache(lambda hits: holds(intervals.share(hits, num, confidence), truth))
    assert coverage(num_draws, lambda g: of(int(g.binomial(num, truth)))) >= least(num_draws)


def test_several_looks_share_what_one_may_spend():
    """Five looks at growing samples, of which the widest error is still that of all together."""
    draw, truth, bounds = REWARDS["even"]

    def always(generator: np.random.Generator, confidence: Confidence) -> bool:
        values = draw(generator, 250)
        return all(holds(intervals.mean(values[:num], confidence, bounds), truth) for num in range(50, 251, 50))

    assert coverage(200, lambda g: always(g, Looks(ALPHA, num=5))) >= least(200)
    assert coverage(200, lambda g: always(g, Looks(ALPHA))) < 0.86
    assert sum(spent(ALPHA, look) for look in range(1, 100_000)) == pytest.approx(ALPHA, rel=1e-4)


@pytest.mark.parametrize(("num", "num_draws"), SIZES)
def test_pairs_of_one_item_are_narrower_than_their_samples_and_cover(num, num_draws):
    looks = Looks(ALPHA)

    def pair(generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        ease = generator.random(num)
        return (generator.random(num) < ease).astype(float), (generator.random(num) < ease).astype(float)

    assert coverage(num_draws, lambda g: holds(intervals.paired(*pair(g), looks, UNIT), 0.0)) >= least(num_draws)
    newer, older = pair(np.random.default_rng(1))
    if num >= 64:
        assert intervals.paired(newer, older, looks).error < intervals.difference(newer, older, looks).error


@pytest.mark.parametrize(("num", "num_draws"), SIZES)
@pytest.mark.parametrize("sharpness", [0.0, 3.0, -3.0])
def test_a_mean_of_few_ratings_and_many_predictions_covers_whatever_predicts(sharpness, num, num_draws):
    """A predictor that is right, worth nothing, or the wrong way round: unbiased, and not wider than ratings alone."""
    looks, narrower = Looks(ALPHA), []

    def rated(generator: np.random.Generator) -> bool:
        truth = (generator.random(11 * num) < 0.3).astype(float)
        score = 1 / (1 + np.exp(-sharpness * (truth - 0.5) - generator.normal(0, 0.5, 11 * num)))
        found = intervals.predicted_mean(truth[:num], score[:num], score[num:], looks, UNIT)
        alone = intervals.mean(truth[:num], looks, UNIT)
        narrower.append(found.error / alone.error)
        return holds(found, 0.3)

    assert coverage(num_draws, rated) >= least(num_draws)
    if num >= 64:
        assert np.mean(narrower) < (0.8 if sharpness > 0 else 1.05)


@pytest.mark.parametrize(
    ("num", "num_draws"),
    [pytest.param(300, 100), *(pytest.param(n, 1000, marks=pytest.mark.slow) for n in (100, 300, 1000))],
)
@pytest.mark.parametrize("step", [0.05, 0.15])
def test_a_change_estimated_from_another_versions_sessions_covers(step, num, num_draws):
    """Sessions of twenty choices at p = 0.6 of a version at 0.6 - step; good as often as its choices are."""
    looks, was, now = Looks(ALPHA), 0.6 - step, 0.6
    refused = []

    def estimated(generator: np.random.Generator) -> bool:
        good = generator.binomial(20, was, num)
        logs = good * math.log(now / was) + (20 - good) * math.log((1 - now) / (1 - was))
        found = change(logs, (generator.random(num) < good / 20).astype(float), looks, UNIT)
        refused.append(found.interval is None)
        return found.interval is None or holds(found.interval, step)

    assert coverage(num_draws, estimated) >= least(num_draws, 0.87)
    if step < 0.1:
        assert np.mean(refused) < 0.05


@pytest.mark.parametrize(("num", "words"), [(60, "100 are needed"), (400, "moved too far"), (0, "no session")])
def test_a_change_that_the_log_cannot_tell_is_refused_in_words(num, words):
    generator = np.random.default_rng(3)
    good = generator.binomial(60, 0.3, num)
    logs = good * math.log(0.6 / 0.3) + (60 - good) * math.log(0.4 / 0.7)
    found = change(logs - (math.log(max(1e-300, np.exp(logs).mean())) if num else 0), good / 60, Looks(), UNIT)
    assert found.interval is None
    assert words in found.reason


def test_a_wrong_propensity_moves_the_mean_weight_from_one():
    """The engine sampled twenty choices at 0.5 or 0.58, and the record says 0.5."""
    generator = np.random.default_rng(4)
    found = {}
    for sampled in (0.5, 0.58):
        good = generator.binomial(20, sampled, 300)
        logs = good * math.log(0.55 / 0.5) + (20 - good) * math.log(0.45 / 0.5)
        found[sampled] = change(logs, good / 20, Looks(), UNIT)
    assert not found[0.5].is_off
    assert found[0.58].is_off
    assert "must be 1" in found[0.58].reason


def test_what_was_never_logged_is_no_wrong_propensity():
    """The log lacks each session of the less probable half: its version is refused, and nothing is wrong."""
    good = np.random.default_rng(4).binomial(20, 0.5, 600)
    logs = good * math.log(0.45 / 0.5) + (20 - good) * math.log(0.55 / 0.5)
    found = change(logs[good > 9], good[good > 9] / 20, Looks(), UNIT)
    assert not found.is_off
    assert "was never logged" in found.reason


def surprised(sampled_at: float, sharpness: float, step: float, generator: np.random.Generator) -> Change:
    """100 sessions of 15 tokens of 40, recorded at temperature 1, estimated for a version that differs by `step`."""
    logits = generator.normal(0, sharpness, (30, 40))
    was, now, true = (
        _log_softmax(each)
        for each in (logits, logits + step * generator.normal(size=logits.shape), logits / sampled_at)
    )
    entropies = -(np.exp(now) * now).sum(1)
    variances = (np.exp(now) * (now + entropies[:, None]) ** 2).sum(1)
    places = generator.integers(0, len(logits), (100, 15))
    chosen = (generator.random((100, 15, 1)) > np.exp(true).cumsum(1)[places]).sum(-1).clip(0, 39)
    new, old = now[places, chosen], was[places, chosen]
    columns = new, old, entropies[places], variances[places]
    surprises = [surprise_of(*of_session) for of_session in zip(*columns, strict=True)]
    return change((new - old).sum(1), generator.random(100), Looks(), UNIT, surprises=surprises)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


@pytest.mark.parametrize("num_draws", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sharpness", [1.0, 3.0, 8.0])
def test_a_temperature_that_nobody_recorded_is_noticed_and_no_honest_log_is(sharpness, num_draws):
    """The version has moved, by less than would be refused; 1.3 is noticed at once, and 0.7 too."""
    generator = np.random.default_rng(5)
    honest = [surprised(1.0, sharpness, step, generator).is_off for step in (0.05, 0.15) for _ in range(num_draws)]
    assert np.mean(honest) <= 0.02
    for temperature, words in ((1.3, "less probable"), (0.7, "more probable")):
        found = [surprised(temperature, sharpness, 0.1, generator) for _ in range(20)]
        assert sum(each.is_off for each in found) >= 17
        assert sum(words in (each.reason or "") for each in found) >= 17


def test_what_a_version_does_and_its_log_never_shows_is_no_wrong_probability():
    """Of 100 sessions of 30 decisions none has what was done with 0.001 and is done with 0.006 now: 4.2 errors."""
    old, new = 0.001, 0.006
    entropy = -(new * math.log(new) + (1 - new) * math.log(1 - new))
    variance = new * (1 - new) * math.log(new / (1 - new)) ** 2
    logged = [np.full(30, each) for each in (math.log(1 - new), math.log(1 - old), entropy, variance)]
    log_weight = float((logged[0] - logged[1]).sum())
    found = change([log_weight] * 100, [0.5] * 100, Looks(), UNIT, surprises=[surprise_of(*logged)] * 100)
    assert not found.is_off
    assert "was never logged" in found.reason


def test_the_surprise_of_tokens_by_hand():
    """π = (3/4, 1/4) and μ = (1/2, 1/2): H = 0.5623; the two tokens weigh 3/2 and 1/2, and their mean by μ is 0."""
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    both = [surprise_of([math.log(p)], [math.log(0.5)], [entropy], [0.226]) for p in (0.75, 0.25)]
    assert [each.total for each in both] == pytest.approx([1.5 * -0.274653, 0.5 * 0.823959], abs=1e-5)
    assert sum(each.total for each in both) == pytest.approx(0.0, abs=1e-12)
    assert both[0].variance == 0.226
    assert [each.seen for each in both] == pytest.approx([1.5 * 0.075434, 0.5 * 0.678908], abs=1e-5)
    assert [each.reweighted for each in both] == pytest.approx([2.25 * 0.075434, 0.25 * 0.678908], abs=1e-5)


def test_quantiles_and_exact_tests_equal_published_values():
    """Student's t from the tables; Clopper and Pearson's 3 of 10; McNemar's exact test of 2 gains and 8 losses."""
    assert [student(0.05, freedom) for freedom in (1, 2, 7, 20)] == pytest.approx(
        [12.706, 4.303, 2.365, 2.086], abs=2e-3
    )
    exact = intervals.share(3, 10, Looks())
    assert (exact.low, exact.high) == pytest.approx((0.0667, 0.6525), abs=1e-4)
    assert intervals.sign_test(gains=2, losses=8) == pytest.approx(56 / 1024)
    nothing = intervals.share(0, 10, Looks())
    assert (nothing.low, nothing.high) == pytest.approx((0.0, 0.3085), abs=1e-4)
