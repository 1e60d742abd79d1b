"""A real trainer process under `kill -9` at each stage of an update, and the process that resumes."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.killed_trainer import STAGES, STAGES_IN_EVERY_RUN, Trainers, running_trainers
from support.trainer_ledger import Rollouts, load_model, make_model, new_ledger

from turnwise.store import queries

VERSIONS = (1, 2)


def play(directory: Path, model: Path) -> Path:
    """Create a ledger with two batches; return the directory."""
    directory.mkdir()
    db = new_ledger(directory / "ledger.db")
    Rollouts(db, load_model(model)).play("a", num_groups=6)
    db.close()
    return directory


def train(trainers: Trainers, directory: Path, model: Path, *die_at: str) -> int:
    """Run a trainer over the ledger; return its exit status."""
    config = directory / "trainer.toml"
    config.write_text(
        f"""
        database = "sqlite:///{directory / "ledger.db"}"
        model = "{model}"
        policies_dir = "{directory / "policies"}"
        groups_per_batch = 3
        num_minibatches = 2
        total_batches = 2
        max_staleness = 10
        row_tokens = 16
        num_threads = 1
        wait_seconds = 0.0
        progress = false
        """
    )
    return trainers.train(config, *die_at)


def state_of(directory: Path, version: int) -> dict[str, torch.Tensor]:
    """Return the weights of a version, and all tensors of the trainer's own state."""
    policies = directory / "policies"
    saved = torch.load(policies / f"v{version:06d}.trainer" / "state.pt", weights_only=True)
    optimizer = {
        f"{name}.{key}": value
        for name, values in saved["optimizer"]["state"].items()
        for key, value in values.items()
        if isinstance(value, torch.Tensor)
    }
    return load_file(policies / f"v{version:06d}" / "model.safetensors") | optimizer


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
    [stage if stage in STAGES_IN_EVERY_RUN else pytest.param(stage, marks=pytest.mark.slow) for stage in STAGES],
)
def test_a_trainer_killed_at_any_stage_and_restarted_ends_with_the_same_weights(
    tmp_path, trainers, model, uninterrupted, stage
):
    """Bit for bit, each group trained once, no files left behind, and no wait for the killed trainer's lease."""
    killed = play(tmp_path / "run", model)
    assert train(trainers, killed, model, STAGES[stage]) == -signal.SIGKILL
    assert train(trainers, killed, model) == 0
    for version in VERSIONS:
        expected, resumed = state_of(uninterrupted, version), state_of(killed, version)
        assert expected.keys() == resumed.keys()
        assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    assert not list((killed / "policies").glob(".writing-*"))
    db = new_ledger(killed / "ledger.db")
    with db.read() as conn:
        assert queries.counts(conn).groups == {"trained": 6}
        assert [record.update_id for record in queries.updates(conn)[0]] == [2, 1]
    db.close()
