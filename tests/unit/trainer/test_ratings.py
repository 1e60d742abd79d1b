"""What a session is worth where few are rated, by hand."""

import dataclasses
import datetime

import numpy as np
import pytest
from support.ledger_samples import make_turn

from trainer.features import FEATURES, Settings
from trainer.features.imported import Imported
from trainer.features.ratings import (
    FIRST_SHARE,
    MOST_SCORES,
    NUM_SIGNALS,
    OBSERVED,
    ByHead,
    Known,
    as_shares,
    check_ratings,
    corrected,
    observed,
    scored,
    share_of,
)
from turnwise.errors import SettingsError
from turnwise.features.ratings.head import Features
from turnwise.features.ratings.rated import RatedSession
from turnwise.features.sentinels import Played
from turnwise.types import SessionStatus

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def session(name="s", **fields):
    place = {"session_pk": 1, "tenant": "default", "session_id": name, "policy_version": 0, "ended_at": NOW}
    return RatedSession(**place, **fields)


def test_a_rating_that_was_asked_for_corrects_the_prediction_by_one_over_its_probability():
    """λ h = 0.3; asked with 1/4: 0.3 + (1 − 0.3) · 4 = 3.1. Of ten that could be asked five are in the batch: 1.7."""
    rated = {("default", "s"): 1.0}
    assert corrected(session(), {}, 0.3, 1.0) == 0.3
    assert corrected(session(probability=0.25), rated, 0.3, 1.0) == pytest.approx(3.1)
    assert corrected(session(probability=0.25), rated, 0.3, 2.0) == pytest.approx(1.7)
    assert corrected(session(), rated, 0.3, 1.0) == pytest.approx(1.0)


def test_the_mean_of_all_is_that_of_the_ratings_whatever_the_head_says():
    """Four sessions of which each is asked about with 1/2: 1 and 0 are rated, so the mean is (1 + 0) / 2 = 0.5."""
    rated = {("default", "a"): 1.0, ("default", "b"): 0.0}
    every = [session("a", probability=0.5), session("b", probability=0.5), session("c"), session("d")]
    for predicted in (0.0, 0.4, 0.9):
        values = [corrected(each, rated, predicted, 1.0) for each in every]
        assert sum(values) / 4 == pytest.approx(0.5)


def test_the_share_of_the_head_is_fitted_to_predictions_before_their_ratings():
    """Predictions that say the rating have λ = 1, twice as far apart 1/2, and those that say the opposite 0."""
    ratings = as_shares([0.0, 1.0] * 5)
    right = [session(predicted=rating) for rating in ratings]
    assert share_of(right, ratings) == pytest.approx(1.0)
    assert share_of([session(predicted=2 * rating) for rating in ratings], ratings) == pytest.approx(0.5)
    assert share_of(right, 1 - ratings) == 0.0
    assert share_of(right[:9], ratings[:9]) == FIRST_SHARE


def test_ratings_are_read_from_the_lowest_to_the_highest_where_they_are_no_shares():
    assert as_shares([0.0, 0.25, 1.0]).tolist() == [0.0, 0.25, 1.0]
    assert as_shares([-1.0, 0.0, 1.0]).tolist() == [0.0, 0.5, 1.0]


def test_a_head_is_told_what_sentinels_see_of_a_session_and_what_was_asked_for_again():
    """A failed tool call of one, and of three calls one retried; two choices of one call are one call."""
    first, result = make_turn("t1"), {"role": "tool", "content": "Error: no file"}
    again = dataclasses.replace(make_turn("t2", first), messages=[result])
    turns = [first, dataclasses.replace(again, turn_id="t2#1"), again, dataclasses.replace(again, turn_id="t3")]
    one = Played(session_id="s", status=SessionStatus.EXPIRED, turns=turns)
    told = dict(zip([*OBSERVED, "asked_again"], observed(one), strict=True))
    assert (told["failed_calls"], told["given_up"], told["asked_again"]) == (1.0, 1.0, pytest.approx(1 / 3))
    assert np.isnan(told["broken_calls"])
    assert np.isnan(observed(None)).all()


@pytest.mark.parametrize("algorithm", ["dpo", "sft", "gae"])
def test_an_algorithm_that_does_not_train_by_one_advantage_a_session_is_refused(tmp_path, algorithm):
    with pytest.raises(SettingsError, match=f"the algorithm '{algorithm}' does not train by it"):
        check_ratings(Settings(model=str(tmp_path), ratings="control", algorithm=algorithm))
    check_ratings(Settings(model=str(tmp_path), ratings="newest", algorithm=algorithm))
    check_ratings(Settings(model=str(tmp_path), ratings="control"))


def test_unrated_sessions_are_added_before_imported_ones_which_begin_behind_all_that_were_sampled():
    assert FEATURES.beside.index(ByHead) < FEATURES.beside.index(Imported)


def test_a_head_is_told_what_the_judges_say_that_scored_most_sessions():
    many = {f"rare-{n}": 0.0 for n in range(MOST_SCORES)}
    sessions = [session(scores={"judge": 0.25}), session(scores={"judge": 0.5, **many}), session()]
    found = scored(sessions)
    assert found.shape == (3, MOST_SCORES)
    assert found[:, 0].tolist()[:2] == [0.25, 0.5]
    assert np.isnan(found[2]).all()
    assert scored([session()]).shape == (1, 0)


@pytest.mark.parametrize(("ratings", "num_valued"), [([0.0] * 10, 0), ([1.0] + [0.0] * 9, 30)])
def test_ten_equal_ratings_train_nothing_whatever_the_head_says(monkeypatch, ratings, num_valued):
    """Its noise at full size would lead the policy away: a run of the demo went from 0.2 to 0 in that way."""
    monkeypatch.setattr(ByHead, "_keep", lambda *_: None)
    names = [{"session_pk": n, "tenant": "t", "session_id": f"s{n}", "ended_at": NOW} for n in range(30)]
    given = [*ratings, *[None] * 20]
    sessions = [RatedSession(**own, policy_version=0, rating=one) for own, one in zip(names, given, strict=True)]
    rng = np.random.default_rng(0)
    features = Features(rng.normal(size=(30, 20)), np.zeros((30, NUM_SIGNALS)))
    known = Known(
        sessions, {}, np.empty((30, 0)), num_candidates=30, claimed=frozenset(one.key for one in sessions[:10])
    )
    credit, _ = object.__new__(ByHead)._valued(known, features)
    assert len(credit) == num_valued
