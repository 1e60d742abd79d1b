"""Two processes under `torchrun` give the same losses and weights as one."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.migrated import new_database
from support.tiny_models import load_model, make_model
from support.trainer_ledger import Rollouts, write_settings
from support.waiting import WAIT_SECONDS

PROGRAM = """
import sys
from pathlib import Path
from trainer.main import run
from trainer.features import Settings
from turnwise.settings import load_settings
sys.exit(run(load_settings(Settings, config=Path(sys.argv[1]), section="trainer", overrides={})))
"""


def train(directory, model, num_processes, kind, *, num_groups=20, total_batches=5, checkpoint_every=1):
    if not directory.exists():
        directory.mkdir()
        db = new_database(directory / "ledger.db")
        Rollouts(db, load_model(model)).play("a", num_groups=num_groups)
        db.close()
    config = write_settings(
        directory / "trainer.toml",
        directory,
        model,
        kind=kind,
        lora_rank=4,
        multi_devices=num_processes > 1,
        groups_per_batch=4,
        num_minibatches=4,
        learning_rate=3e-4,
        total_batches=total_batches,
        checkpoint_every=checkpoint_every,
        keep_versions=1,
    )
    program = directory / "program.py"
    program.write_text(PROGRAM)
    several = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_processes)]
    launcher = [sys.executable, *(several if num_processes > 1 else []), str(program)]
    done = subprocess.run([*launcher, str(config)], timeout=WAIT_SECONDS, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (directory / "policies" / "trainer.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "update" in line]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "file"), [("full", "model.safetensors"), ("lora", "adapter_model.safetensors")])
def test_two_processes_give_the_losses_and_weights_of_one_over_twenty_updates(tmp_path, kind, file):
    model = make_model(tmp_path / "model")
    alone = train(tmp_path / "one", model, 1, kind)
    together = train(tmp_path / "two", model, 2, kind)
    assert len(alone) == len(together) == 20
    assert together == pytest.approx(alone, abs=1e-5)
    expected = load_file(tmp_path / "one" / "policies" / "v000005" / file)
    sharded = load_file(tmp_path / "two" / "policies" / "v000005" / file)
    assert set(expected) == set(sharded)
    apart = max(float((sharded[name] - value).abs().max()) for name, value in expected.items())
    print(f"{kind}: losses apart by {max(map(abs, np.subtract(together, alone))):.1e}, weights by {apart:.1e}")
    for name, value in expected.items():
        torch.testing.assert_close(sharded[name], value, atol=1e-5, rtol=0)
