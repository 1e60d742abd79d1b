"""A real trainer process that dies as under `kill -9`, and the one that comes after it."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file
from trainer_ledger import Rollouts, load_model, make_model, new_ledger

from trainer.fault import EXIT_STATUS
from turnwise.store import queries

PROGRAM = """
import sys
from pathlib import Path
from trainer.main import run
from trainer.settings import TrainerSettings
from turnwise.settings import load_settings
flags = dict(pair.split("=", 1) for pair in sys.argv[2:])
sys.exit(run(load_settings(TrainerSettings, config=Path(sys.argv[1]), section="trainer", overrides=flags)))
"""


def train(directory, model, **flags):
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
        num_threads = 1
        wait_seconds = 0.0
        progress = false
        """
    )
    pairs = [f"{name}={value}" for name, value in flags.items()]
    return subprocess.run([sys.executable, "-c", PROGRAM, str(config), *pairs], timeout=180, check=False).returncode


@pytest.mark.parametrize("stage", ["after_optimizer_step:3", "after_checkpoint:2"])
def test_a_process_that_died_in_mid_update_is_followed_by_one_that_ends_with_the_same_weights(tmp_path, stage):
    """Bit for bit, each group trained once, and without waiting for the dead one's lease of a minute."""
    model = make_model(tmp_path / "model")
    for name in ("straight", "killed"):
        (tmp_path / name).mkdir()
        db = new_ledger(tmp_path / name / "ledger.db")
        Rollouts(db, load_model(model)).play("a", num_groups=6)
        db.close()
    assert train(tmp_path / "straight", model) == 0
    assert train(tmp_path / "killed", model, fault=stage) == EXIT_STATUS
    assert train(tmp_path / "killed", model) == 0

    final = "policies/v000002/model.safetensors"
    expected, resumed = load_file(tmp_path / "straight" / final), load_file(tmp_path / "killed" / final)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    db = new_ledger(tmp_path / "killed" / "ledger.db")
    with db.read() as conn:
        assert queries.counts(conn).groups == {"trained": 6}
        assert queries.counts(conn).num_updates == 2
    db.close()
