"""Sessions that people are asked about: each is drawn with a known probability, for one rater at a time."""

import collections
import datetime
import random

import pytest
import sqlalchemy as sa
from support.ledger_samples import add_finished, add_session, sampled_by

from turnwise.errors import Conflict
from turnwise.features import consent, feedback, forks, retention
from turnwise.features.feedback import Feedback, FeedbackKind
from turnwise.features.ratings import draws, predictions, rated, shown
from turnwise.features.ratings.predictions import Prediction
from turnwise.store import extensions, sessions, turns
from turnwise.store.sessions import end_session, read_session
from turnwise.types import DEFAULT_POLICY, Session, Split, utc_now

SOON, LATER = (datetime.timedelta(seconds=seconds) for seconds in (60, 3600))


def add_over(database, *names: str, **fields) -> None:
    for name in names:
        session = add_session(database, name, **fields)
        with database.write() as conn:
            end_session(conn, session.tenant, name)


def thumb(session_id: str, *, up: bool = True, tenant: str = "default") -> Feedback:
    return Feedback(session_id=session_id, tenant=tenant, kind=FeedbackKind.BOOLEAN, content={"value": up})


def ask(conn, rater: str = "ann", tenant: str = "default", seed: int = 0, **fields) -> draws.Draw | None:
    return draws.next_draw(conn, tenant, DEFAULT_POLICY, rater, drawn=random.Random(seed), **fields)


def rate_next(conn, *, up: bool = True, **fields) -> str:
    drawn = ask(conn, **fields)
    draws.rate(conn, "default", drawn.session_id, float(up), thumb(drawn.session_id, up=up))
    return drawn.session_id


def test_a_draw_takes_each_session_that_is_over_and_unrated_with_the_same_probability(database):
    add_over(database, "a", "b", "c", "d")
    add_session(database, "open")
    add_finished(database, "rewarded by a program")
    add_over(database, "of a group", group_id="g")
    add_over(database, "to evaluate", split=Split.EVAL)
    add_over(database, "marked", train=False)
    add_over(database, "without a call", turns=0)
    add_over(database, "of another tenant", tenant="other")
    counted = collections.Counter()
    with database.write() as conn:
        for seed in range(400):
            undone = conn.begin_nested()
            drawn = ask(conn, seed=seed)
            undone.rollback()
            assert (drawn.num_candidates, drawn.probability) == (4, 0.25)
            counted[drawn.session_id] += 1
    assert counted.keys() == set("abcd")
    assert min(counted.values()) > 70  # 400 / 4 = 100, with a standard deviation of 8.7


def test_two_raters_get_two_sessions_and_one_who_asks_again_the_same(database):
    add_over(database, "a", "b")
    with database.write() as conn:
        first, again, other = ask(conn, "ann"), ask(conn, "ann"), ask(conn, "ben")
        assert first.session_id == again.session_id != other.session_id
        assert (first.num_candidates, other.num_candidates) == (2, 1)
        assert ask(conn, "cas") is None


def test_what_a_rater_has_left_or_put_back_is_handed_to_another_one_before_anything_is_drawn(database):
    add_over(database, "a", "b", "c")
    now = utc_now()
    with database.write() as conn:
        left = ask(conn, "ann", lease_seconds=600, now=now)
        assert ask(conn, "ben", now=now + SOON).session_id != left.session_id
        taken = ask(conn, "cas", now=now + LATER)
        assert (taken.draw_id, taken.rater, taken.num_candidates) == (left.draw_id, "cas", 3)
        draws.put_back(conn, "default", taken.session_id)
        assert ask(conn, "cas", now=now + LATER).draw_id != left.draw_id
        draws.put_back(conn, "default", taken.session_id)
        assert ask(conn, "dora", now=now + LATER).draw_id == left.draw_id


def test_a_rating_is_the_sessions_reward_once_and_a_later_one_replaces_it(database):
    add_over(database, "a")
    with database.write() as conn:
        with pytest.raises(Conflict, match="nobody was asked about session 'a'"):
            draws.rate(conn, "default", "a", 1.0, thumb("a"))
        ask(conn)
        for _ in range(2):
            draws.rate(conn, "default", "a", 1.0, thumb("a"))
        _, lines = sessions.read_session_with_rewards(conn, "default", "a")
        assert [line.value for line in lines] == [1.0]
        draws.rate(conn, "default", "a", 0.0, thumb("a", up=False))
        assert read_session(conn, "default", "a").reward == 0.0
        assert draws.draw_of(conn, "default", "a").rating == 0.0
        assert ask(conn) is None


def test_a_users_own_thumb_takes_no_session_out_of_the_draw_and_has_no_probability(database):
    add_over(database, "a", "b")
    with database.write() as conn:
        feedback.add(conn, thumb("a", up=False), reward=0.0)
        (a, b) = rated.sessions_of(conn, DEFAULT_POLICY)
        assert (a.rating, a.source, a.probability, b.source) == (0.0, "volunteered", None, None)
        for _ in range(2):
            rate_next(conn)
        found = rated.sessions_of(conn, DEFAULT_POLICY)
        assert [(one.rating, one.source, one.probability) for one in found] == [(1.0, "asked", 1.0)] * 2
        assert read_session(conn, "default", "a").reward == 1.0


def test_four_of_forty_are_asked_about_with_a_tenth_and_weighting_gives_all_forty_in_the_mean(database):
    add_over(database, *(f"s{number}" for number in range(40)), of_turns=sampled_by(3))
    totals = []
    with database.write() as conn:
        for seed in range(60):
            undone = conn.begin_nested()
            for at in range(4):
                rate_next(conn, seed=1000 * seed + at)
            found = [one for one in rated.sessions_of(conn, DEFAULT_POLICY) if one.source == "asked"]
            undone.rollback()
            assert [one.probability for one in found] == pytest.approx([0.1] * 4)
            assert {one.policy_version for one in found} == {3}
            totals.append(sum((int(one.session_id[1:]) < 10) / one.probability for one in found))
    assert sum(totals) / 60 == pytest.approx(10, abs=3 * 8.3 / 60**0.5)  # 8.3: deviation of 10 / 40 · (0 … 4)


def test_sessions_that_came_after_a_draw_or_are_older_than_its_window_were_not_in_it():
    at = utc_now()
    drawn = draws.Draw(
        draw_id=1, tenant="t", policy_id=0, policy_version=0, num_candidates=4, since=at - LATER, rater="ann",
        asked_at=at, leased_until=None,
    )  # fmt: skip
    assert draws.inclusion([drawn, drawn], at - SOON, at - SOON) == 1 - 0.75**2
    assert draws.inclusion([drawn], at - SOON, at + SOON) == 0
    assert draws.inclusion([drawn], at - 2 * LATER, at - SOON) == 0


def test_a_deletion_leaves_of_a_draw_its_probability_alone(database):
    add_over(database, "a", "b")
    with database.write() as conn:
        session_id = rate_next(conn)
        (other,) = {"a", "b"} - {session_id}
        predictions.keep(conn, [predicted(other)])
        for name in ("a", "b"):
            retention.delete_session(conn, "default", name)
        (left,) = draws.draws_of(conn, DEFAULT_POLICY)
        assert (left.session_id, left.rating, left.rater, left.num_candidates) == (None, None, "", 2)
        assert conn.execute(sa.select(predictions.predicted_rewards)).all() == []
        assert ask(conn) is None
        retention.delete_tenant(conn, "default")
        assert draws.draws_of(conn, DEFAULT_POLICY) == []


def test_a_session_that_is_marked_after_its_draw_is_handed_to_nobody_and_its_rating_trains_nothing(database):
    add_over(database, "a")
    with database.write() as conn:
        ask(conn, "ann")
        consent.restrict_session(conn, "default", "a", "a-", record=True)
        assert ask(conn, "ann") is None
        assert rated.sessions_of(conn, DEFAULT_POLICY) == []


def predicted(session_id: str, mean: float = 0.8125) -> Prediction:
    place = {"tenant": "default", "session_id": session_id, "policy_id": 0, "policy_version": 1}
    return Prediction(**place, mean=mean, deviation=0.1)


def test_a_session_says_that_it_is_asked_about_rated_or_predicted(database):
    add_over(database, "a", "b", "c")
    with database.write() as conn:
        drawn = ask(conn)
        unrated = sorted({"a", "b", "c"} - {drawn.session_id})
        predictions.keep(conn, [predicted(drawn.session_id, 0.3), predicted(unrated[0])])

        def said() -> dict[str, str]:
            values = extensions.read_columns(conn, "session", "default", ["a", "b", "c"], wanted=[shown.RATING])
            return {name: values.add({}, name)["rating"] for name in ("a", "b", "c")}

        expected = {unrated[0]: "predicted 0.81 ± 0.10", unrated[1]: None}
        assert said() == expected | {drawn.session_id: "asked"}
        draws.rate(conn, "default", drawn.session_id, 1.0, thumb(drawn.session_id))
        assert predictions.keep(conn, [predicted(drawn.session_id, 0.99)]) == 0
        assert said() == expected | {drawn.session_id: "rated"}
        (one,) = [each for each in rated.sessions_of(conn, DEFAULT_POLICY) if each.source == "asked"]
        assert one.predicted == 0.3  # as it was before the rating


def test_the_doctor_says_how_many_ratings_are_missing_until_the_next_version(database):
    add_over(database, "a", "b", "c")
    with database.write() as conn:
        assert list(shown.EXTENSION.findings(conn, "default")) == []
        rate_next(conn)
        ask(conn)
        text = "policy 'default': 1 sessions are rated, and 2 are not; 9 ratings are missing until the next version"
        assert list(shown.EXTENSION.findings(conn, None)) == [("ratings", text)]


def test_the_other_reply_of_a_fork_is_offered_where_both_answer_the_same_prompt(database):
    add_over(database, "a", turns=2)
    origin = {"forked_from": {"session_id": "a", "turn_id": "a-t2"}}
    fork = Session(session_id="f", metadata=origin)
    with database.write() as conn:
        assert draws.pair_of(conn, "default", "a") is None
        path, _ = forks.read_path(conn, read_session(conn, "default", "a"), "a-t2", before=True)
        forks.copy_turns(conn, fork, path[0], path)
        assert draws.pair_of(conn, "default", "a") is None
        view = turns.read_turn(conn, "default", "a-t2")
        own = forks.copy_of(view.turn, fork, turn_id="f-t2", parent_turn_id=forks.copy_id(fork, "a-t1"))
        turns.append_turns(conn, [own])
        assert draws.pair_of(conn, "default", "a") == draws.Pair(
            turn_id="a-t2", other_turn_id="f-t2", other_session_id="f"
        )
