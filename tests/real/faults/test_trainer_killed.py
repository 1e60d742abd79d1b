"""A real trainer process under `kill -9` at each stage of an update, and the process that resumes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.killed_trainer import (
    BEHIND_IN_EVERY_RUN,
    KILLED_IN_EVERY_RUN,
    STAGES,
    STAGES_BEHIND,
    Trainers,
    running_trainers,
)
from support.trainer_ledger import Rollouts, load_model, make_model, new_ledger, write_settings
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from turnwise.store import policies, queries, trained
from turnwise.types import PolicyStatus


def play(directory: Path, model: Path, num_batches: int = 2) -> Path:
    """Create a ledger with batches of three groups; return the directory."""
    directory.mkdir()
    db = new_ledger(directory / "ledger.db")
    Rollouts(db, load_model(model)).play("a", num_groups=3 * num_batches)
    db.close()
    return directory


def train(trainers: Trainers, directory: Path, model: Path, *die_at: str, total: int = 2, every: int = 1) -> int:
    """Run a trainer over the ledger; return its exit status."""
    batches = {"groups_per_batch": 3, "num_minibatches": 2, "total_batches": total, "checkpoint_every": every}
    config = write_settings(directory / "trainer.toml", directory, model, row_tokens=16, **batches)
    return trainers.train(config, *die_at)


def state_of(directory: Path, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, and all tensors of the trainer's own state."""
    policies = directory / "policies"
    saved = tensors_of_state(policies, version)
    return load_file(policies / f"v{version:06d}" / "model.safetensors") | saved


def tensors_of_state(policies: Path, version: int) -> dict[str, torch.Tensor]:
    """Return the tensors of a trainer's state by name, written by any number of processes."""
    place = policies / f"v{version:06d}.trainer" / "tensors"
    whole = policies.parent / f"whole-{version}.pt"
    dcp_to_torch_save(place, whole)
    saved = torch.load(whole, weights_only=True)
    moments = {
        f"{name}.{key}": value
        for name, values in saved["optimizer"]["state"].items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return moments | {f"state.{name}": value for name, value in saved["model"].items()}


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with running_trainers() as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model") / "model")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, trainers, model):
    """The result of a trainer that is not killed."""
    directory = play(tmp_path_factory.mktemp("straight") / "run", model)
    assert train(trainers, directory, model) == 0
    return directory


@pytest.mark.parametrize(
    "stage",
    [stage if stage in KILLED_IN_EVERY_RUN else pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES],
)
def test_a_trainer_killed_at_any_stage_and_restarted_ends_with_the_same_weights(
    tmp_path, trainers, model, uninterrupted, stage
):
    """Bit for bit, each group trained once, no files left behind, and no wait for the killed trainer's lease."""
    killed = play(tmp_path / "run", model)
    assert train(trainers, killed, model, STAGES[stage]) == -signal.SIGKILL
    assert train(trainers, killed, model) == 0
    db = new_ledger(killed / "ledger.db")
    with db.read() as conn:
        assert queries.counts(conn).groups == {"trained": 6}
        made = {record.update_id: record.policy_version for record in queries.updates(conn)[0]}
        published = {policy.version: policy for policy in policies.list_policies(conn)[0]}
    db.close()
    assert list(made) == [2, 1]
    for update_id, version in made.items():
        expected, resumed = state_of(uninterrupted, update_id), state_of(killed, version)
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(expected[name], resumed[name]) for name in expected)
        assert published[version].is_written
    assert all(policy.status is PolicyStatus.FAILED for policy in published.values() if not policy.is_written)
    assert not list((killed / "policies").glob(".writing-*"))


@pytest.fixture(scope="module")
def published_ahead(tmp_path_factory, trainers, model):
    """The result of a trainer that is not killed and writes its state every second version."""
    directory = play(tmp_path_factory.mktemp("ahead") / "run", model, 4)
    assert train(trainers, directory, model, total=4, every=2) == 0
    return directory


@pytest.mark.parametrize(
    "stage",
    [stage if stage in BEHIND_IN_EVERY_RUN else pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES_BEHIND],
)
def test_a_trainer_that_publishes_ahead_of_its_state_trains_each_group_once_under_any_kill(
    tmp_path, trainers, model, published_ahead, stage
):
    """Groups of versions without a state are trained again from the last state, to the same weights bit for bit."""
    killed = play(tmp_path / "run", model, 4)
    assert train(trainers, killed, model, STAGES_BEHIND[stage], total=4, every=2) == -signal.SIGKILL
    assert train(trainers, killed, model, total=4, every=2) == 0
    db = new_ledger(killed / "ledger.db")
    with db.read() as conn:
        newest = policies.newest_policy(conn).version
        assert queries.counts(conn).groups == {"trained": 12}
        views, _ = trained.list_updates(conn, "default")
    db.close()
    assert [view.update.update_id for view in views] == [4, 3, 2, 1]
    assert len({session.session_id for view in views for session in view.sessions}) == 48
    assert sum(len(view.sessions) for view in views) == 48
    expected, resumed = state_of(published_ahead, 4), state_of(killed, newest)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert not list((killed / "policies").glob(".writing-*"))
