"""One training step can be followed: it stays within few files of the trainer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for

import trainer
from trainer.train import OnPolicyWorkflow

ROOT = Path(trainer.__file__).parent
MOST_FILES = 25
"""A bound on what a reader opens. Lower it when a step needs fewer."""


def test_a_step_stays_within_few_files(tmp_path, model, ledger):
    """From the claim to the acknowledgement, in the thread that trains."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    workflow = OnPolicyWorkflow.build_from_config(settings_for(tmp_path, model), enable_jit=False)
    state = workflow.setup(0)
    files: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.add(path.relative_to(ROOT).as_posix())

    sys.setprofile(note)
    try:
        _, state = workflow.step(state)
    finally:
        sys.setprofile(None)
    workflow.close()
    assert state.progress.policy_version == 1
    assert {"train.py", "claims.py", "update.py", "commit.py"} <= files
    assert len(files) <= MOST_FILES, sorted(files)
