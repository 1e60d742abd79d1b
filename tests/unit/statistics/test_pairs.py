"""The exact test of answers that became worse: against counts by hand, and how often it errs and finds."""

import itertools
import math

import numpy as np
import pytest

from turnwise.features.statistics.intervals import sign_test
from turnwise.features.statistics.pairs import Right, losses_test


def test_five_right_answers_that_become_five_wrong_ones_come_by_chance_once_in_252():
    """Of 10 answers 5 are right: C(10, 5) = 252 ways to share them out, and one gives the newer version none."""
    assert losses_test([Right(0, 5)], [Right(5, 5)]) == pytest.approx(1 / 252)


def test_with_one_answer_a_version_it_is_the_exact_mcnemar_test():
    """Three examples were lost and one was gained; the two that stay alike say nothing."""
    older = [Right(each, 1) for each in (1, 1, 1, 0, 1, 0)]
    newer = [Right(each, 1) for each in (0, 0, 0, 1, 1, 0)]
    assert losses_test(newer, older) == pytest.approx(sign_test(gains=1, losses=3))


def test_the_law_is_that_of_all_ways_to_share_out_the_right_answers():
    """Two examples with 2 of 4 and 3 of 5 right answers, the older version's being 2 and 3 of theirs."""
    pairs = [(Right(1, 2), Right(1, 2)), (Right(0, 2), Right(3, 3))]

    def losses(shares: list[tuple[float, float]]) -> int:
        return sum(round(6 * max(0.0, old - new)) ** 2 for new, old in shares)

    ways = [
        [(sum(drawn) / new.num, (new.right + old.right - sum(drawn)) / old.num) for drawn in _draws(new, old)]
        for new, old in pairs
    ]
    found = [losses(list(way)) for way in itertools.product(*ways)]
    observed = losses([(new.share, old.share) for new, old in pairs])
    exact = sum(each >= observed for each in found) / len(found)
    assert losses_test(*zip(*pairs, strict=True)) == pytest.approx(exact)


def _draws(new: Right, old: Right) -> list[tuple[bool, ...]]:
    """Return all ways in which the newer version's answers are some of both versions' answers."""
    answers = [True] * (new.right + old.right) + [False] * (new.num + old.num - new.right - old.right)
    return [tuple(answers[place] for place in each) for each in itertools.combinations(range(len(answers)), new.num)]


def test_gains_elsewhere_do_not_make_up_for_what_is_lost():
    """The sign test of all pairs of answers sees 175 gains and 25 losses."""
    newer = [Right(0, 5)] * 5 + [Right(5, 5)] * 35
    older = [Right(5, 5)] * 5 + [Right(0, 5)] * 35
    assert losses_test(newer, older) < 0.002
    assert sign_test(gains=175, losses=25) > 0.99


def test_without_a_pair_nothing_has_become_worse():
    assert losses_test([], []) == 1.0
    assert losses_test([Right(0, 5)], [Right(0, 0)]) == 1.0


@pytest.mark.parametrize("num_draws", [200, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, None], ids=["rarely", "half", "mostly", "each otherwise"])
def test_versions_that_answer_alike_differ_at_the_level_at_most_as_often_as_it_says(share, num_draws):
    """40 examples, five answers a version; three standard errors of the simulation are allowed."""
    generator = np.random.default_rng(3)

    def draw() -> bool:
        chances = generator.random(40) if share is None else np.full(40, share)
        new, old = ([Right(int(right), 5) for right in generator.binomial(5, chances)] for _ in range(2))
        return losses_test(new, old) <= 0.05

    assert np.mean([draw() for _ in range(num_draws)]) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / num_draws)
