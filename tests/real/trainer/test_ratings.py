"""A policy of which few sessions are rated, trained at each ten new ratings."""

from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train

from turnwise.features.page import updates as page_updates
from turnwise.features.ratings.rated import sessions_of
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
    """Fifteen ratings are one version: five wait for five more."""
    play(ledger, model, "first", 15)
    assert train(few(tmp_path, model, "newest", total_batches=1)).metrics["num_updates"] == 2 * 8
    play(ledger, model, "second", 5)
    state = train(few(tmp_path, model, "newest", total_batches=2))
    assert state.progress.recent_versions == (0, 1, 2)
    first, second = trained(ledger)
    assert (len(first), len(second), first & second) == (10, 10, set())


def test_unrated_sessions_are_trained_by_what_the_head_predicts_of_them(tmp_path, model, ledger):
    play(ledger, model, "rated", 10)
    play(ledger, model, "unrated", 60, is_rated=False)
    metrics = train(few(tmp_path, model, "control", total_batches=1)).metrics
    assert (metrics["num_predicted_sessions"], metrics["num_sessions"], metrics["num_updates"]) == (50, 60, 4)
    assert metrics["head_share"] == 0.5
    (of_update,) = trained(ledger)
    assert {f"rated-{number}-0" for number in range(10)} < of_update
    assert len(of_update) == 60
    with ledger.read() as conn:
        known = sessions_of(conn, DEFAULT_POLICY)
    predicted = [one for one in known if one.predicted is not None]
    assert len(predicted) == 50
    assert all(one.rating is None and 0 < one.predicted < 1 < 1 + one.deviation for one in predicted)


def test_the_setting_changes_defaults_and_nothing_that_is_set(tmp_path, model):
    changed = settings_for(tmp_path, model, ratings="newest")
    assert (changed.reuse_epochs, changed.singles_per_group, changed.wait_seconds) == (8, 1, 0.0)
    assert settings_for(tmp_path, model).reuse_epochs == 1
