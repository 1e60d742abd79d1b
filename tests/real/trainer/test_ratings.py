"""A policy of which few sessions are rated, trained at each ten new ratings."""

import math

import numpy as np
import pytest
from support.gloo_worlds import run_world
from support.ledger_samples import add_session, finish
from support.tiny_models import VOCABULARY, load_model
from support.tiny_vision import make_vision_model
from support.trainer_ledger import Rollouts, settings_for, train
from support.world_tasks import train_ledger

from trainer.features.ratings import FIRST_SHARE
from trainer.update import Updates
from turnwise.features.page import updates as page_updates
from turnwise.features.ratings.rated import sessions_of
from turnwise.store.sessions import end_session
from turnwise.types import DEFAULT_POLICY


def play(ledger, model, name, num, **changes):
    Rollouts(ledger, load_model(model), has_groups=False, **changes).play(name, num_groups=num, group_size=1)


def trained(ledger):
    """Return the sessions of each update, oldest first."""
    with ledger.read() as conn:
        views, _ = page_updates.list_update_views(conn, "default")
    return [{each.session_id for each in view.sessions} for view in reversed(views)]


def few(tmp_path, model, ratings, **changes):
    return settings_for(tmp_path, model, ratings=ratings, groups_per_batch=10, num_minibatches=2, **changes)


def test_each_ten_ratings_make_a_version(tmp_path, model, ledger):
    """Fifteen ratings are one version: five wait for five more. What a head predicts of others is kept, not trained."""
    play(ledger, model, "first", 15)
    play(ledger, model, "unrated", 3, is_rated=False)
    metrics = train(few(tmp_path, model, "newest", total_batches=1)).metrics
    assert (metrics["num_updates"], metrics["num_predicted_sessions"], metrics["num_sessions"]) == (2 * 8, 3, 10)
    play(ledger, model, "second", 5)
    state = train(few(tmp_path, model, "newest", total_batches=2))
    assert state.progress.recent_versions == (0, 1, 2)
    first, second = trained(ledger)
    assert (len(first), len(second), first & second) == (10, 10, set())
    with ledger.read() as conn:
        predicted = [one.predicted for one in sessions_of(conn, DEFAULT_POLICY)]
    assert len(predicted) == 23
    assert None not in predicted


def test_unrated_sessions_are_trained_by_what_the_head_predicts_of_them(tmp_path, model, ledger):
    play(
        ledger,
        model,
        "rated",
        10,
        metadata={"scores": {"judge": 0.5, "unsure": math.nan, "text": "good", "huge": 10**400}},
    )
    play(ledger, model, "unrated", 60, is_rated=False)
    metrics = train(few(tmp_path, model, "control", total_batches=1)).metrics
    assert (metrics["num_predicted_sessions"], metrics["num_sessions"], metrics["num_updates"]) == (50, 60, 4)
    assert metrics["head_share"] == 0.5
    assert 0 <= metrics["head_auroc_shuffled"] <= 1
    (of_update,) = trained(ledger)
    assert {f"rated-{number}-0" for number in range(10)} < of_update
    assert len(of_update) == 60
    with ledger.read() as conn:
        known = sessions_of(conn, DEFAULT_POLICY)
    assert [one.scores for one in known] == [{"judge": 0.5}] * 10 + [{}] * 60
    predicted = [one for one in known if one.predicted is not None]
    assert len(predicted) == 50
    assert all(one.rating is None and 0 < one.predicted < 1 < 1 + one.deviation for one in predicted)


def test_the_share_of_the_head_is_fitted_to_heads_that_did_not_know_the_ratings(tmp_path, model, ledger):
    """The second ten are rated before any prediction; those whose rating is the mean of all are trained too."""
    play(ledger, model, "first", 10)
    train(few(tmp_path, model, "control", total_batches=1))
    play(ledger, model, "second", 10, is_flipped=True)
    metrics = train(few(tmp_path, model, "control", total_batches=2)).metrics
    with ledger.read() as conn:
        known = sessions_of(conn, DEFAULT_POLICY)
    assert [one.predicted is None for one in known] == [True] * 10 + [False] * 10
    assert metrics["head_share"] != FIRST_SHARE
    assert [len(each) for each in trained(ledger)] == [10, 10]


def test_an_interrupted_batch_is_claimed_again_and_takes_the_unrated_sessions_of_then(
    tmp_path, model, ledger, monkeypatch
):
    play(ledger, model, "rated", 10)
    play(ledger, model, "early", 3, is_rated=False)

    def is_killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Updates, "take", is_killed)
        with pytest.raises(KeyboardInterrupt):
            train(few(tmp_path, model, "control", total_batches=1))
    assert trained(ledger) == []
    play(ledger, model, "late", 3, is_rated=False)
    assert train(few(tmp_path, model, "control", total_batches=1)).progress.recent_versions == (0, 1)
    (of_update,) = trained(ledger)
    assert len(of_update) == 16
    with ledger.read() as conn:
        known = sessions_of(conn, DEFAULT_POLICY)
    assert [one.predicted is None for one in known] == [True] * 10 + [False] * 6


def test_what_an_undone_version_sampled_and_what_is_too_long_is_not_trained_by_predictions(tmp_path, model, ledger):
    play(ledger, model, "rated", 10)
    play(ledger, model, "unrated", 3, is_rated=False)
    play(ledger, model, "undone", 3, is_rated=False, version=7)
    play(ledger, model, "long", 3, is_rated=False, num_turns=9)
    metrics = train(few(tmp_path, model, "control", total_batches=1, max_chain_tokens=40)).metrics
    assert (metrics["num_predicted_sessions"], metrics["num_sessions"]) == (3, 13)
    (of_update,) = trained(ledger)
    assert {name.partition("-")[0] for name in of_update} == {"rated", "unrated"}


@pytest.mark.parametrize("is_rated", [True, False])
def test_a_session_that_the_model_cannot_compute_tells_the_head_nothing(tmp_path, model, ledger, is_rated):
    """As after a change of the base model: its own group is refused, and the others make a version."""
    add_session(ledger, "foreign", of_turns={"prompt_delta": np.array([VOCABULARY + 7, 1], np.int32)})
    if is_rated:
        finish(ledger, "foreign")
    else:
        with ledger.write() as conn:
            end_session(conn, "default", "foreign")
    play(ledger, model, "rated", 10)
    metrics = train(few(tmp_path, model, "newest", total_batches=1)).metrics
    assert (metrics["num_sessions"], metrics["num_predicted_sessions"]) == (10, 0)


def test_the_head_listens_to_the_text_of_a_model_with_images(tmp_path, ledger):
    images = make_vision_model(tmp_path / "images", "Gemma3")
    play(ledger, images, "rated", 10)
    metrics = train(few(tmp_path, images, "newest", total_batches=1)).metrics
    assert 0 <= metrics["head_auroc_shuffled"] <= 1


def test_the_setting_changes_defaults_and_nothing_that_is_set(tmp_path, model):
    changed = settings_for(tmp_path, model, ratings="newest")
    assert (changed.reuse_epochs, changed.singles_per_group, changed.wait_seconds) == (8, 1, 0.0)
    assert settings_for(tmp_path, model).reuse_epochs == 1


def test_two_processes_train_what_one_trains(tmp_path, model, ledger):
    """Both compute the head's features, and the first one says what each session is worth."""
    play(ledger, model, "rated", 10)
    play(ledger, model, "unrated", 5, is_rated=False)
    assert run_world(2, train_ledger, few(tmp_path, model, "control", total_batches=1)) == [1, 1]
    (of_update,) = trained(ledger)
    assert len(of_update) == 15
