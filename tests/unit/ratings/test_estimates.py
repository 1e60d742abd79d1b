"""What the asked say of a version: its interval holds as often as it says, and a head that is fooled is named."""

import dataclasses
import datetime

import numpy as np
import pytest

from turnwise.features.ratings import estimates
from turnwise.features.ratings.draws import Draw, inclusion
from turnwise.features.ratings.rated import RatedSession, RatingSource

START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def at(seconds: float) -> datetime.datetime:
    return START + datetime.timedelta(seconds=seconds)


def session(number: int, *, version: int = 1, ended: float = 0.0, **fields) -> RatedSession:
    named = {"session_pk": number, "tenant": "t", "session_id": f"s{number}"}
    return RatedSession(**named, policy_version=version, ended_at=at(ended), **fields)


def asked(number: int, rating: float, *, probability: float = 0.1, **fields) -> RatedSession:
    source = RatingSource.ASKED
    return session(number, rating=rating, source=source, probability=probability, rated_at=START, **fields)


def replay(rng: np.random.Generator, truth: float, num: int, num_asked: int) -> list[RatedSession]:
    """Return sessions that end one after another while people are asked, of those that have ended and are unrated."""
    ended = np.sort(rng.random(num))
    ratings = (rng.random(num) < truth).astype(float)
    times = np.sort(rng.uniform(0.2, 1.0, num_asked))
    draws: list[Draw] = []
    drawn: list[int] = []
    is_left = np.ones(num, bool)
    for time in times:
        candidates = np.flatnonzero(is_left & (ended <= time))
        if not len(candidates):
            continue
        drawn.append(int(rng.choice(candidates)))
        is_left[drawn[-1]] = False
        draws.append(
            Draw(
                draw_id=len(draws),
                tenant="t",
                policy_id=0,
                policy_version=1,
                num_candidates=len(candidates),
                since=START,
                rater="ann",
                asked_at=at(time),
                leased_until=None,
            )
        )
    return [
        asked(number, ratings[number], probability=inclusion(draws, at(ended[number]), at(ended[number])))
        for number in drawn
    ]


@pytest.mark.parametrize("num_asked", [10, 40])
def test_the_interval_holds_in_85_of_100_of_200_replays_at_least(num_asked):
    rng = np.random.default_rng(num_asked)
    covered = 0
    for _ in range(200):
        truth = rng.uniform(0.1, 0.9)
        interval = estimates.true_reward(replay(rng, truth, 120, num_asked))
        covered += interval.low <= truth <= interval.high
    assert covered >= 170


def test_sessions_that_were_rarely_asked_about_stand_for_more():
    """(1 · 1/0.5 + 0 · 1/0.1) / (1/0.5 + 1/0.1) = 2 / 12."""
    found = estimates.true_reward([asked(1, 1.0, probability=0.5), asked(2, 0.0, probability=0.1)])
    assert found.mean == pytest.approx(1 / 6)
    assert estimates.true_reward([asked(1, 1.0)]) is None


def test_a_version_says_what_the_asked_say_and_beside_it_what_the_head_says_and_no_thumb_counts():
    known = [asked(number, float(number % 2), predicted=0.75) for number in range(4)]
    thumb = {"rating": 1.0, "source": RatingSource.VOLUNTEERED}
    known += [session(9, predicted=0.25), session(10, **thumb), session(11, version=2)]
    newest, first = estimates.of_versions(known)
    assert (newest.policy_version, newest.num_sessions, newest.num_rated, newest.mean) == (2, 1, 0, None)
    assert (first.num_sessions, first.num_rated, first.num_predicted) == (6, 4, 5)
    assert first.mean == pytest.approx(0.5)
    assert first.predicted == pytest.approx(0.65)
    assert first.low < 0.5 < first.high


def hacked(seed: int, *, is_fooled: bool, unsure: float = 0.05) -> list[RatedSession]:
    """Return three versions with ten ratings each; from version 2 on the head likes what people do not, if fooled."""
    rng = np.random.default_rng(seed)
    known = []
    for version in (1, 2, 3):
        truth = 0.6 if version == 1 else 0.25 if is_fooled else 0.7
        for number in range(10):
            rating = float(rng.random() < truth)
            likes = 0.85 if is_fooled and version > 1 else truth
            guess = float(np.clip(likes + rng.normal(0, 0.1), 0.02, 0.98))
            known.append(asked(10 * version + number, rating, version=version, predicted=guess, deviation=unsure))
    return known


def test_a_head_that_is_fooled_is_named_within_two_versions_and_one_that_is_right_is_not():
    def alarms(seed: int, *, is_fooled: bool) -> list[int]:
        known = hacked(seed, is_fooled=is_fooled)
        seen = [[one for one in known if one.policy_version <= version] for version in (1, 2, 3)]
        return [version for version, some in enumerate(seen, 1) if estimates.overrated(some, version, 0.1)]

    fooled = [alarms(seed, is_fooled=True) for seed in range(100)]
    assert sum(bool(each) for each in fooled) >= 90
    assert sum(bool(alarms(seed, is_fooled=False)) for seed in range(100)) <= 5


@pytest.mark.parametrize(("unsure", "is_alarm"), [(0.42, False), (0.05, True)])
def test_a_head_that_is_as_unsure_as_it_is_wrong_is_no_alarm(unsure, is_alarm):
    """In a run of the demo a head of ten ratings said 0.44 of ten bad sessions, and the next version was good."""
    first = [asked(n, float(n < 3), version=0, predicted=0.3, deviation=0.4) for n in range(10)]
    second = [asked(10 + n, 0.0, version=1, predicted=0.44 + 0.01 * (n % 3), deviation=unsure) for n in range(10)]
    assert (estimates.overrated([*first, *second], 2, 0.1) is not None) is is_alarm


def test_the_most_overrated_sessions_are_named_and_a_head_that_was_always_wrong_is_no_alarm():
    known = hacked(0, is_fooled=True)
    found = estimates.overrated(known, 3, 0.1)
    worst = {one.session_id for one in known if one.policy_version > 1 and one.rating == 0}
    assert set(found.session_ids) <= worst
    assert found.predicted > 0.8
    assert found.rated < 0.5
    always = [dataclasses.replace(one, predicted=0.9) for one in known]
    assert estimates.overrated(always, 3, 0.1) is None
