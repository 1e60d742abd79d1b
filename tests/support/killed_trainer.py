"""A trainer that is killed at the n-th call of a function.

    python killed_trainer.py CONFIG [MODULE:FUNCTION:N]

As a program it ends as under `kill -9`. At `torch:save:N` half of the N-th file is on disk; every other function is
killed before it runs.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from trainer.main import run
from trainer.settings import TrainerSettings
from turnwise.settings import load_settings

STAGES = {
    "claimed": "trainer.loop.workflows:select:2",
    "between two rows of a minibatch": "trainer.policy.agent:loss_of:3",
    "between two rows of the last minibatch": "trainer.policy.agent:loss_of:23",
    "after some optimizer steps": "trainer.policy.agent:pack:4",
    "after the last optimizer step": "trainer.publish.directory:probe_of:2",
    "the policy's directory half written": "turnwise.version_directory:file_digest:2",
    "the trainer's state half written": "torch:save:2",
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


def dying(where: str, die: Callable[[], None]) -> tuple[ModuleType, str, Callable[..., Any]]:
    """Return module, name and replacement of the function; the replacement kills at its n-th call."""
    module_name, name, number = where.split(":")
    module = importlib.import_module(module_name)
    original = getattr(module, name)
    calls = itertools.count(1)

    def kill_at_nth_call(*args: Any, **options: Any) -> Any:
        if next(calls) == int(number):
            if where.startswith("torch:save"):
                original(*args, **options)
                os.truncate(args[1], Path(args[1]).stat().st_size // 2)
            die()
        return original(*args, **options)

    return module, name, kill_at_nth_call


if __name__ == "__main__":
    for where in sys.argv[2:]:
        setattr(*dying(where, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    sys.exit(run(load_settings(TrainerSettings, config=Path(sys.argv[1]), section="trainer", overrides={})))
