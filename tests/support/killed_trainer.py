"""Trainer processes that are killed at the n-th call of a function.

    python killed_trainer.py

It reads lines of JSON, `[CONFIG, "MODULE:FUNCTION:N", ...]`, runs a trainer for each line, and prints its exit status.
Each trainer is a fork of this process, which has imported torch already: importing it takes longer than the training.
A trainer ends as under `kill -9`, before the function runs.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

TRAIN_SECONDS = 180.0
IMPORTED = ("transformers.models.qwen3.modeling_qwen3", "trainer.main", "alembic.command")
"""What every trainer needs."""

STAGES = {
    "claimed": "trainer.loop.workflows:select:2",
    "between two rows of a minibatch": "trainer.policy.agent:loss_of:3",
    "between two rows of the last minibatch": "trainer.policy.agent:loss_of:23",
    "after some optimizer steps": "trainer.policy.agent:pack:4",
    "after the last optimizer step": "trainer.publish.directory:probe_of:2",
    "the policy's directory half written": "turnwise.version_directory:file_digest:2",
    "the trainer's state half written": "torch.distributed.checkpoint.state_dict_saver:save:2",
    "after the checkpoint": "turnwise.store.claims:ack:2",
    "inside the publishing transaction": "turnwise.store.claims:publish_policy:2",
    "after the first publication": "turnwise.store.policies:active_policy:1",
    "after the last publication": "turnwise.store.policies:active_policy:2",
}
"""Stages of an update, and the next call of the trainer at each: two batches of two optimizer steps each, in rows of
one session.
"""

STAGES_IN_EVERY_RUN = (
    "between two rows of a minibatch",
    "the trainer's state half written",
    "inside the publishing transaction",
)
"""The others are slow tests."""

STAGES_BEHIND = {
    "after the first version is published": "trainer.loop.workflows:select:2",
    "while the first state is written": "torch.distributed.checkpoint.state_dict_saver:save:1",
    "while the second state is written": "torch.distributed.checkpoint.state_dict_saver:save:2",
    "after the second state is written": "turnwise.store.claims:ack:3",
    "inside the acknowledging transaction": "turnwise.store.claims:ack:4",
}
"""The same for a trainer of four batches that writes its state every second version, in a thread."""

BEHIND_IN_EVERY_RUN = ("after the second state is written",)
"""The others are slow tests."""


class Trainers:
    """The program, as a child of the test."""

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
    """Run the program until the block ends."""
    with subprocess.Popen(
        [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield Trainers(process)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def dying(where: str, die: Callable[[], None]) -> tuple[ModuleType, str, Callable[..., Any]]:
    """Return module, name and replacement of the function; the replacement kills at its n-th call."""
    module_name, name, number = where.split(":")
    module = importlib.import_module(module_name)
    original = getattr(module, name)
    calls = itertools.count(1)

    def kill_at_nth_call(*args: Any, **options: Any) -> Any:
        if next(calls) == int(number):
            die()
        return original(*args, **options)

    return module, name, kill_at_nth_call


def run_trainer(config: str, *die_at: str) -> int:
    """Run a trainer in this process; return its exit status."""
    from trainer.main import run
    from trainer.settings import TrainerSettings
    from turnwise.settings import load_settings

    for where in die_at:
        setattr(*dying(where, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    return run(load_settings(TrainerSettings, config=Path(config), section="trainer", overrides={}))


def main() -> None:
    """Run trainers until stdin ends."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            sys.exit(run_trainer(*json.loads(line)))
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
