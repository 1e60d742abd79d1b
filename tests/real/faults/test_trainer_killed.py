"""A real trainer process under `kill -9` at each stage of an update, and the process that resumes."""

import functools
import signal
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
from support.migrated import new_database
from support.tiny_models import load_model, make_model
from support.trainer_ledger import Rollouts, new_policy, write_settings
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from turnwise.features.page import overview
from turnwise.features.page import updates as page_updates
from turnwise.features.page.updates import list_updates
from turnwise.store import serving, versions
from turnwise.types import DEFAULT_POLICY, PolicyStatus


def play(directory: Path, model: Path, num_batches: int = 2, num_policies: int = 1) -> Path:
    """Create a ledger with batches of three groups of the default policy and of named ones; return the directory."""
    directory.mkdir()
    db = new_database(directory / "ledger.db")
    for number in range(num_policies):
        policy_id = new_policy(db, f"p{number}") if number else DEFAULT_POLICY
        rollouts = Rollouts(db, load_model(model), policy_id=policy_id)
        rollouts.play(f"of {policy_id}", num_groups=3 * num_batches, seed=number)
    db.close()
    return directory


def train(
    trainers: Trainers, directory: Path, model: Path, *die_at: str, total: int = 2, every: int = 1, **settings: Any
) -> int:
    """Run a trainer over the ledger; return its exit status."""
    batches = {"groups_per_batch": 3, "num_minibatches": 2, "total_batches": total, "checkpoint_every": every}
    config = write_settings(directory / "trainer.toml", directory, model, row_tokens=16, **batches, **settings)
    return trainers.train(config, *die_at)


def state_of(version: Path) -> dict[str, torch.Tensor]:
    (weights,) = version.glob("*model.safetensors")
    return load_file(weights) | tensors_of_state(version)


def tensors_of_state(version: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a trainer's state by name, written by any number of processes."""
    whole = version.with_name(f"{version.name}.whole.pt")
    dcp_to_torch_save(version.with_name(f"{version.name}.trainer") / "tensors", whole)
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


class Run(NamedTuple):
    settings: dict[str, Any]
    num_policies: int = 1
    trains_once: bool = True
    """Whether each session is trained once; a replay buffer samples some again."""


RUNS = {
    "on policy": Run({}),
    "two policies": Run({"kind": "lora"}, num_policies=2),
    "off policy": Run({"workflow": "off_policy", "buffer_min_groups": 3, "buffer_groups": 5}, trains_once=False),
}


def paths_by_policy(directory: Path) -> dict[int, list[Path]]:
    """Return the directories of the versions that updates made, oldest first, by policy."""
    made = defaultdict(list)
    db = new_database(directory / "ledger.db")
    with db.read() as conn:
        for record in reversed(list_updates(conn)[0]):
            made[record.policy_id].append(Path(versions.get_version(conn, record.policy_version).path))
    db.close()
    return made


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, trainers, model):
    """Return the result of a run that is not killed; each is trained once."""

    @functools.cache
    def trained_by(name: str) -> dict[int, list[Path]]:
        run = RUNS[name]
        directory = play(tmp_path_factory.mktemp("straight") / "run", model, num_policies=run.num_policies)
        assert train(trainers, directory, model, **run.settings) == 0
        return paths_by_policy(directory)

    return trained_by


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        pytest.param(name, stage, marks=() if stage in KILLED_IN_EVERY_RUN else pytest.mark.slow)
        for name in RUNS
        for stage in STAGES
    ],
)
def test_a_trainer_killed_at_any_stage_and_restarted_ends_with_the_same_weights(
    tmp_path, trainers, model, uninterrupted, name, stage
):
    """Bit for bit, each session trained once, no files left behind, and no wait for the killed trainer's lease.

    So state, claims, buffer and random numbers are those of the last commit.
    """
    run = RUNS[name]
    killed = play(tmp_path / "run", model, num_policies=run.num_policies)
    assert train(trainers, killed, model, STAGES[stage], **run.settings) == -signal.SIGKILL
    assert train(trainers, killed, model, **run.settings) == 0
    db = new_database(killed / "ledger.db")
    with db.read() as conn:
        assert overview.count_rows(conn).groups == {"trained": 6 * run.num_policies}
        views, _ = page_updates.list_update_views(conn, "default")
        published = versions.list_versions(conn)[0]
    db.close()
    assert [view.update.update_id for view in views] == list(range(2 * run.num_policies, 0, -1))
    sessions = [session.session_id for view in views for session in view.sessions]
    assert len(set(sessions)) == 24 * run.num_policies
    assert len(sessions) == len(set(sessions)) or not run.trains_once
    expected, resumed = uninterrupted(name), paths_by_policy(killed)
    assert {policy_id: len(made) for policy_id, made in resumed.items()} == dict.fromkeys(range(run.num_policies), 2)
    for policy_id, made in resumed.items():
        for one, other in zip(map(state_of, expected[policy_id]), map(state_of, made), strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)
    written = {Path(policy.path) for policy in published if policy.is_written}
    assert written >= {path for made in resumed.values() for path in made}
    assert all(policy.status is PolicyStatus.FAILED for policy in published if not policy.is_written)
    assert not list((killed / "policies").rglob(".writing-*"))


@pytest.fixture(scope="module")
def published_ahead(tmp_path_factory, trainers, model):
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
    db = new_database(killed / "ledger.db")
    with db.read() as conn:
        newest = Path(serving.serving_state(conn).newest.path)
        assert overview.count_rows(conn).groups == {"trained": 12}
        views, _ = page_updates.list_update_views(conn, "default")
    db.close()
    assert [view.update.update_id for view in views] == [4, 3, 2, 1]
    assert len({session.session_id for view in views for session in view.sessions}) == 48
    assert sum(len(view.sessions) for view in views) == 48
    expected, resumed = state_of(published_ahead / "policies" / "v000004"), state_of(newest)
    assert expected.keys() == resumed.keys()
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert not list((killed / "policies").glob(".writing-*"))
