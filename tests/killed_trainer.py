"""A whole trainer process that `kill -9` ends in the middle of what it does: at the n-th call of a function.

    python killed_trainer.py CONFIG [MODULE:FUNCTION:N]

`torch:save:N` dies with half of the N-th file on disk; every other function dies before it has done anything.
"""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

from trainer.main import run
from trainer.settings import TrainerSettings
from turnwise.settings import load_settings


def die_at(where: str) -> None:
    """Replace the function by one that dies at its n-th call."""
    module_name, name, number = where.split(":")
    module = importlib.import_module(module_name)
    original = getattr(module, name)
    calls = itertools.count(1)

    def called(*args: Any, **options: Any) -> Any:
        if next(calls) == int(number):
            if where.startswith("torch:save"):
                original(*args, **options)
                os.truncate(args[1], Path(args[1]).stat().st_size // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **options)

    setattr(module, name, called)


if __name__ == "__main__":
    for where in sys.argv[2:]:
        die_at(where)
    sys.exit(run(load_settings(TrainerSettings, config=Path(sys.argv[1]), section="trainer", overrides={})))
