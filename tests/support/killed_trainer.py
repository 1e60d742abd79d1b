"""Trainer processes that are killed at a stage of an update.

    python killed_trainer.py

It reads lines of JSON, `[CONFIG, "STEP:N", ...]`, runs a trainer for each line, and prints its exit status.
Each trainer is a fork of this process, which has imported torch already: importing it takes longer than the training.
A trainer ends as under `kill -9` when it starts the step for the n-th time.
"""

import contextlib
import gc
import importlib
import itertools
import json
import os
import pkgutil
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

TRAIN_SECONDS = 600.0
IMPORTED = ("transformers.models.qwen3.modeling_qwen3", "trainer.main", "alembic.command")
"""What every trainer needs."""

FUNCTIONS = {
    "select groups of a batch": "trainer.update:select",
    "compute the loss of a row": "trainer.model.agent:loss_of",
    "pack a minibatch": "trainer.model.agent:pack",
    "compute the probe of a version": "trainer.train:probe_of",
    "digest a file of a version": "turnwise.version_directory:file_digest",
    "save the trainer's state": "torch.distributed.checkpoint.state_dict_saver:save",
    "acknowledge groups": "turnwise.store.claims:ack",
    "publish in the transaction": "turnwise.store.claims:publish_version",
    "read the versions in use": "trainer.claims.ledger:Ledger.versions_in_use",
}
"""Steps of the trainer, and the function that does each: the only place in the tests that names these functions."""

STAGES = {
    "claimed": "select groups of a batch:2",
    "between two rows of a minibatch": "compute the loss of a row:3",
    "between two rows of the last minibatch": "compute the loss of a row:23",
    "after some optimizer steps": "pack a minibatch:4",
    "after the last optimizer step": "compute the probe of a version:2",
    "the policy's directory half written": "digest a file of a version:2",
    "the trainer's state half written": "save the trainer's state:2",
    "after the checkpoint": "acknowledge groups:2",
    "inside the publishing transaction": "publish in the transaction:2",
    "after the first publication": "read the versions in use:1",
    "after the last publication": "read the versions in use:2",
}
"""Stages of an update: the trainer is killed when it starts the step for the n-th time. It trains two batches of two
optimizer steps each, in rows of one session.
"""

KILLED_IN_EVERY_RUN = (
    "the trainer's state half written",
    "between two rows of a minibatch",
    "inside the publishing transaction",
)
"""Stages at which a trainer is killed in `make test-real`; the others are slow tests."""

STAGES_BEHIND = {
    "after the first version is published": "select groups of a batch:2",
    "while the first state is written": "save the trainer's state:1",
    "while the second state is written": "save the trainer's state:2",
    "after the second state is written": "acknowledge groups:3",
    "inside the acknowledging transaction": "acknowledge groups:4",
}
"""The same for a trainer of four batches that writes its state every second version, in a thread."""

BEHIND_IN_EVERY_RUN = ("after the second state is written",)
"""The others are slow tests."""


class Trainers:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def train(self, config: Path, *die_at: str) -> int:
        """Run a trainer with these settings; return its exit status, or the negative number of its signal."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        print(json.dumps([str(config), *die_at]), file=stdin, flush=True)
        assert select.select([stdout], [], [], TRAIN_SECONDS)[0], "the trainer did not end in time"
        return int(stdout.readline())


@contextlib.contextmanager
def running_trainers() -> Iterator[Trainers]:
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield Trainers(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def dying(stage: str, die: Callable[[], None]) -> tuple[ModuleType | type, str, Callable[..., Any]]:
    """Return module or class, name and replacement of the step's function; the replacement kills at its n-th call."""
    step, number = stage.split(":")
    owner_name, _, name = FUNCTIONS[step].replace(":", ".").rpartition(".")
    owner = pkgutil.resolve_name(owner_name)
    original = getattr(owner, name)
    calls = itertools.count(1)

    def kill_at_nth_call(*args: Any, **options: Any) -> Any:
        if next(calls) == int(number):
            die()
        return original(*args, **options)

    return owner, name, kill_at_nth_call


def run_trainer(config: str, *die_at: str) -> int:
    """Run a trainer in this process; return its exit status."""
    from trainer.features import Settings
    from trainer.main import run
    from turnwise.settings import load_settings

    for where in die_at:
        setattr(*dying(where, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    return run(load_settings(Settings, config=Path(config), section="trainer", overrides={}))


def main() -> None:
    gc.disable()
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    gc.enable()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.exit(run_trainer(*json.loads(line)))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
