"""The head of few ratings: it finds the maximum that others find, says how sure it is, and learns nothing of noise."""

import numpy as np
import pytest

from turnwise.features.ratings import head
from turnwise.features.ratings.head import Features, Space


def played(num: int, seed: int, *, shows: float = 3.0) -> tuple[Features, np.ndarray]:
    """Return sessions whose rating shows in one direction of the states, along which these vary most, and in a signal.

    The states have 64 dimensions, and the logit is `shows` times the first of them.
    """
    rng = np.random.default_rng(seed)
    inner = rng.normal(size=(num, 8)) * np.array([3, 2, 1.5, 1, 1, 1, 1, 1])
    states = inner @ np.linalg.qr(np.random.default_rng(9).normal(size=(64, 8)))[0].T
    ratings = rng.random(num) < 1 / (1 + np.exp(-shows * inner[:, 0] / 3))
    signals = np.column_stack([rng.normal(size=num), np.where(rng.random(num) < 0.3, np.nan, rng.normal(size=num))])
    return Features(states, signals), ratings.astype(float)


def test_the_weights_are_the_maximum_that_finite_differences_find_and_the_covariance_the_inverse_of_its_hessian():
    rated, ratings = played(30, 0)
    fitted = head.fit(rated, ratings)
    columns = fitted.space.columns(rated)
    precisions = np.full(columns.shape[1], head.PRECISION)
    precisions[0] = head.PRECISION_OF_BIAS

    def loss(weights: np.ndarray) -> float:
        return head.loss(columns, ratings, precisions, weights)

    steps = np.eye(len(fitted.weights)) * 1e-4
    slopes = [(loss(fitted.weights + step) - loss(fitted.weights - step)) / 2e-4 for step in steps]
    assert np.abs(slopes).max() < 1e-5
    rng = np.random.default_rng(1)
    assert all(loss(fitted.weights) <= loss(fitted.weights + 0.01 * rng.normal(size=len(steps))) for _ in range(200))
    curved = [
        [
            (loss(fitted.weights + one + two) - loss(fitted.weights + one - two)
             - loss(fitted.weights - one + two) + loss(fitted.weights - one - two)) / 4e-8
            for two in steps
        ]
        for one in steps
    ]  # fmt: skip
    np.testing.assert_allclose(np.linalg.inv(fitted.covariance), curved, atol=1e-5)


def test_it_ranks_what_it_was_not_fitted_to_and_knows_nothing_of_shuffled_ratings():
    seen, truth = played(400, 2)
    of = np.arange(400) < 40
    rated = Features(seen.states[of], seen.signals[of])
    fitted = head.fit(rated, truth[of], head.Space.of(seen))
    predicted, _ = fitted.predict(Features(seen.states[~of], seen.signals[~of]))
    best = head.auroc(
        truth[~of], seen.states[~of] @ np.linalg.qr(np.random.default_rng(9).normal(size=(64, 8)))[0][:, 0]
    )
    assert head.auroc(truth[~of], predicted) > best - 0.1
    space = head.Space.of(rated)
    assert head.shuffled(rated, truth[of], space, repeats=20) == pytest.approx(0.5, abs=0.06)
    assert head.left_out(rated, truth[of], space) > 0.6


def test_what_it_says_of_a_session_holds_as_often_as_it_says():
    """Its mean is as often right as it says, within 0.1, and it is less sure of what lies far from all ratings."""
    means, truths = [], []
    for seed in range(40):
        rated, ratings = played(40, seed)
        others, truth = played(100, 1000 + seed)
        predicted, deviations = head.fit(rated, ratings).predict(others)
        means.append(predicted)
        truths.append(truth)
    predicted, truth = np.concatenate(means), np.concatenate(truths)
    for low, high in ((0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.9)):
        among = (predicted > low) & (predicted < high)
        assert truth[among].mean() == pytest.approx(predicted[among].mean(), abs=0.1)
    assert (deviations > 0).all()
    assert (deviations < 0.5).all()


def test_the_same_ratings_give_the_same_bits():
    """So a trainer that starts again needs no stored head."""
    (rated, ratings), (others, _) = played(40, 5), played(50, 6)
    first, again = (head.fit(rated, ratings).predict(others) for _ in range(2))
    assert [array.tobytes() for array in first] == [array.tobytes() for array in again]


def test_a_signal_that_is_not_known_or_never_varies_changes_nothing():
    rated, ratings = played(20, 7)
    constant = Features(rated.states, np.column_stack([rated.signals, np.ones(20), np.full(20, np.nan)]))
    assert head.fit(constant, ratings).weights.tolist() == head.fit(rated, ratings).weights.tolist()
    unknown = Features(rated.states[:1], np.full((1, 2), np.nan))
    average = Features(rated.states[:1], np.nanmean(rated.signals, 0)[None])
    fitted = head.fit(rated, ratings)
    assert fitted.predict(unknown)[0] == pytest.approx(fitted.predict(average)[0])


def test_its_directions_are_those_of_the_singular_value_decomposition():
    seen, _ = played(30, 8)
    space = Space.of(seen, 4)
    _, _, right = np.linalg.svd(seen.states - seen.states.mean(0), full_matrices=False)
    along = space.columns(seen)[:, 1:5]
    assert along.std(0, ddof=1) == pytest.approx(np.ones(4))
    expected = (seen.states - seen.states.mean(0)) @ right[:4].T
    assert np.abs(np.corrcoef(along.T, expected.T)[:4, 4:]) == pytest.approx(np.eye(4), abs=1e-6)


def test_no_rating_or_one_that_is_no_share_is_refused():
    rated, _ = played(2, 0)
    with pytest.raises(ValueError, match=r"from 0 to 1, not \[2.0, 0.0\]"):
        head.fit(rated, [2.0, 0.0])
