"""The publishing gate: its measurements, its refusals, and the weights from which training then continues."""

import numpy as np
import pytest
from safetensors.torch import load_file
from support import trainer_ledger
from support.experience_factory import experience
from support.killed_trainer import STAGES, dying
from support.ledger_samples import add_session, groups_by_status
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, train

from trainer.batch.batch import build
from trainer.claims.ledger import RunProgress
from trainer.features import Settings
from trainer.features.gate import Shift, judge, shifts_of
from trainer.features.rewinds import GivenUp, Rewind, why_held
from turnwise.features import gate, labels
from turnwise.features.labels import Label
from turnwise.store import serving, sessions, versions
from turnwise.types import PolicyStatus, Role, Split
from turnwise.version_directory import read_manifest


def test_a_sessions_shift_is_the_mean_over_all_its_sampled_tokens():
    """Session a has a turn sampled at −1, −1 and another chain at −2, −2; now they are at −0.5, −0.5, −3, −2.

    (0.5 + 0.5 − 1 + 0) / 4 = 0. Session b fell from −1, −1 to −1.5, −1.
    """
    chains = [
        experience(session_id="a", reward=1.0),
        experience(session_id="a", reward=1.0, logprobs=[0, -2, -2]),
        experience(session_id="b"),
    ]
    batch = build(chains, [np.zeros(1)] * 3, policy_version=1)
    logprobs = np.array([-0.5, -0.5, -3, -2, -1.5, -1], np.float32)
    shifts = shifts_of(batch, logprobs, {}, Settings())
    assert [(shift.name, shift.is_good) for shift in shifts] == [("a", True), ("b", False)]
    assert [shift.nats for shift in shifts] == pytest.approx([0.0, -0.25])
    labelled = {("default", "a"): {"failure"}, ("default", "b"): {"golden", "look-at"}}
    assert [shift.is_good for shift in shifts_of(batch, logprobs, labelled, Settings())] == [False, True]


def shifts(good, bad):
    found = [Shift(name=f"good-{n}", is_good=True, nats=nats) for n, nats in enumerate(good)]
    return found + [Shift(name=f"bad-{n}", is_good=False, nats=nats) for n, nats in enumerate(bad)]


@pytest.mark.parametrize(
    ("good", "bad", "words"),
    [
        # The mean is −0.4, its standard error 0.0577; with three degrees of freedom −0.4 + 3.18 × 0.0577 is below −0.1.
        ([-0.3, -0.5] * 2, [], "4 sessions are 0.4 nats a token less likely"),
        # Of two sessions nobody knows the spread: with one degree of freedom it is 12.7 standard errors.
        ([-0.3, -0.5], [], None),
        # The standard error is 0.23: −0.4 + 0.73 is not.
        ([0.0, -0.8] * 2, [], None),
        ([-5.0], [], None),
        ([], [3.0, 3.0], None),
        # Bad replies rise as common good habits do: only their lead over the good ones counts.
        ([0.5, 0.5], [0.5, 0.5], None),
        ([-0.05, -0.05], [0.2, 0.2], "2 bad sessions gained 0.25 nats a token"),
    ],
)
def test_a_version_falls_if_good_replies_lose_or_bad_ones_certainly_gain_on_them(good, bad, words):
    _, reason = judge(shifts(good, bad), Settings(gate_drop=0.1))
    assert reason is None if words is None else words in reason


@pytest.mark.parametrize("nats", [np.nan, -np.inf, np.inf])
@pytest.mark.parametrize("is_good", [True, None])
def test_a_version_without_finite_logprobs_falls(nats, is_good):
    """A mean that is NaN is not below any limit, and the standard error of an infinite value is NaN."""
    found = [*shifts([0.1, 0.2], [0.0]), Shift(name="broken", is_good=is_good, nats=nats)]
    gauges, reason = judge(found, Settings())
    assert reason.startswith("the logprobs of 1 of 4 sessions are not finite under these weights: broken ")
    assert gauges == {"gate_num_not_finite": 1}


def test_a_refusal_names_the_sessions_that_fell_most():
    _, reason = judge(shifts([-0.3, -0.9, -0.5, -0.7], []), Settings())
    assert reason.endswith("What fell most: good-1 -0.90, good-3 -0.70, good-2 -0.50, good-0 -0.30")


def test_training_goes_back_to_the_version_before_the_first_failed_one():
    """5 and 6 come from 4, which was rolled back: all three are left."""
    at = RunProgress(num_batches=1, recent_versions=(2, 3, 4, 5, 6))
    look = GivenUp(failed=frozenset({4, 6}))
    assert why_held(look, at, Settings()) == Rewind(version=3, reason="version 4 failed")
    assert why_held(look, at, Settings(when_failed="go_on")) is None
    assert why_held(GivenUp(), at, Settings()) is None
    tried = RunProgress(num_batches=1, recent_versions=at.recent_versions, rewound_to=3)
    assert why_held(look, tried, Settings()) is None, "its state is not on disk: it is tried once a batch"


POISON = {"learning_rate": 0.3, "gate_sessions": 64, "gate_good_reward": 1.2, "gate_bad_reward": 0.8}
"""A learning rate 100 times that of the other tests."""


def play(ledger, model):
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    Rollouts(ledger, load_model(model), split=Split.EVAL).play("held-out", num_groups=8)


def published(ledger):
    with ledger.read() as conn:
        return {policy.version: policy for policy in versions.list_versions(conn)[0]}


@pytest.mark.parametrize("workflow", ["on_policy", pytest.param("off_policy", marks=pytest.mark.slow)])
def test_a_poisoned_update_is_kept_and_not_served_and_the_next_one_starts_before_it(tmp_path, model, ledger, workflow):
    """Also by a trainer that starts again in between: the third update comes from version 0 as well."""
    play(ledger, model)
    settings = trainer_ledger.settings_for(tmp_path, model, workflow=workflow, buffer_min_groups=1, **POISON)
    train(settings.model_copy(update={"total_batches": 1}))
    first = published(ledger)
    assert first[1].status is PolicyStatus.FAILED
    assert first[1].error.startswith("refused by the publishing gate: good replies of ")
    assert first[1].metrics["gate_good_shift"] < -0.5
    with ledger.read() as conn:
        assert serving.serving_state(conn).newest.version == 0
    good = settings.model_copy(update={"total_batches": 2, "learning_rate": 1e-4})
    state = train(good)
    assert state.progress.recent_versions == (0, 2)
    assert read_manifest(tmp_path / "policies" / "v000002")["parent"] == 0
    assert published(ledger)[2].status is PolicyStatus.PUBLISHED
    base, second = (load_file(place / "model.safetensors") for place in (model, tmp_path / "policies" / "v000002"))
    assert all((base[name] - second[name]).abs().max() < 1e-3 for name in base), "four steps of 1e-4 from version 0"


class Killed(BaseException):
    """Raised where a process would be killed; no code may catch it."""


@pytest.mark.parametrize("stage", ["after the checkpoint", "inside the publishing transaction"])
def test_a_trainer_killed_before_a_refused_batch_is_acknowledged_refuses_the_same_weights_again(
    tmp_path, model, ledger, monkeypatch, stage
):
    """Neither version is served or trained from, and the groups are trained once."""
    play(ledger, model)
    settings = trainer_ledger.settings_for(tmp_path, model, **POISON | {"total_batches": 1})

    def die() -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(*dying(STAGES[stage].replace(":2", ":1"), die))
        with pytest.raises(Killed):
            train(settings)
    train(settings)
    refused = published(ledger)
    assert list(refused) == [2, 1, 0]
    for version in (1, 2):
        assert refused[version].status is PolicyStatus.FAILED
        assert refused[version].error.startswith("refused by the publishing gate: good replies of ")
    assert refused[1].weights_digest == refused[2].weights_digest
    assert train(settings.model_copy(update={"total_batches": 2})).progress.recent_versions == (0, 3)
    assert groups_by_status(ledger) == {"trained": 6}


def test_labelled_sessions_of_any_split_are_in_the_regression_set_without_a_reward(ledger, model):
    Rollouts(ledger, load_model(model)).play("a", num_groups=1, group_size=3)
    Rollouts(ledger, load_model(model), split=Split.EVAL).play("held-out", num_groups=1, group_size=3)
    add_session(ledger, "unrewarded")
    with ledger.write() as conn:
        sessions.end_session(conn, "default", "unrewarded")
        for session_id, label in (("a-0-1", "failure"), ("unrewarded", "failure"), ("held-out-0-2", "golden")):
            labels.set_label(conn, "default", session_id, Label(label=label))
        found, labels_of = gate.regression_set(conn, 2, ["failure", "golden"], roles=[Role.MAIN])
    assert [one.session_id for one in found] == ["a-0-1", "held-out-0-1", "held-out-0-2", "unrewarded"]
    assert labels_of["default", "a-0-1"] == {"failure"}
    assert labels_of["default", "held-out-0-1"] == set()


def test_a_version_that_passes_the_gate_is_published_with_its_measurements(tmp_path, model, ledger):
    play(ledger, model)
    train(trainer_ledger.settings_for(tmp_path, model, **POISON | {"learning_rate": 1e-4, "total_batches": 1}))
    version = published(ledger)[1]
    assert version.status is PolicyStatus.PUBLISHED
    assert version.metrics["gate_num_good"] > 1
    assert abs(version.metrics["gate_good_shift"]) < 0.1
