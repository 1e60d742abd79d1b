"""One training step can be followed: it stays within few files of the trainer, and a claim is few calls deep."""

import inspect
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for

import trainer
from trainer.features import FEATURES
from trainer.features.policies import Policies
from trainer.train import Features
from turnwise.store import claims

ROOT = Path(trainer.__file__).parent
MOST_FILES = {Features(): 20, FEATURES: 22}
"""A bound on what a reader opens outside of the features. Lower it when a step needs fewer."""


def trace(act: Callable[[], object]) -> tuple[set[str], list[str]]:
    """Return the trainer's files that an act calls into, and the functions on the way to the first claim."""
    files: set[str] = set()
    hops: list[str] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            files.add(path.relative_to(ROOT).as_posix())
        if event == "call" and frame.f_code is claims.claim.__code__ and not hops:
            stack = [one.frame.f_code for one in inspect.getouterframes(frame)]
            own = [code for code in stack if Path(code.co_filename).is_relative_to(ROOT)]
            hops.extend(code.co_qualname for code in reversed(own))

    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(None)
    return files, hops


@pytest.mark.parametrize("features", MOST_FILES, ids=["core alone", "all features"])
def test_a_step_stays_within_few_files_and_its_claim_is_five_calls_deep(tmp_path, model, ledger, features):
    """From the loop over all policies to the acknowledgement, in the thread that trains."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    policies = Policies(settings_for(tmp_path, model, total_batches=2), features=features)
    (training,) = policies.trainings
    state = training.setup(0)
    files, _ = trace(lambda: training.step(state))
    training.commits.finish_writing()
    assert {"train.py", "claims/claims.py", "update.py", "versions/state.py"} <= files
    of_features = sorted(file for file in files if file.startswith("features/"))
    names = [re.split(r"[/.]", file)[1] for file in of_features]
    assert len(files) - len(of_features) <= MOST_FILES[features], " ".join(sorted(files))
    assert len(set(names)) == len(names), f"one file a feature: {of_features}"
    _, hops = trace(policies.learn)
    policies.close()
    assert policies.states[0].progress.policy_version == 2
    assert hops == ["Policies.learn", "Training.advance", "Training.step", "Claims.next", "outlast"]
