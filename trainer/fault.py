"""Named points of an update at which a test lets the trainer die. In service they do nothing.

One decision: a crash is injected by name and count, never by a timer, so that each stage of an update is hit exactly
and the test is the same on a slow machine. The points, in order: `after_claim`, `after_optimizer_step`,
`after_policy_directory`, `after_checkpoint`, `after_commit`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable

EXIT_STATUS = 86
"""Status of a process that died at a fault point."""


class FaultPoints:
    """Dies at the n-th passage of one named point."""

    def __init__(self, where: str | None, die: Callable[[], None] | None = None) -> None:
        name, _, count = (where or "").partition(":")
        self._name = name
        self._count = int(count or 1)
        self._die = die or _exit
        self._passed: Counter[str] = Counter()

    def point(self, name: str) -> None:
        """Pass a point: nothing happens unless it is the one to die at."""
        self._passed[name] += 1
        if name == self._name and self._passed[name] == self._count:
            self._die()


def _exit() -> None:
    """Leave as `kill -9` would: no cleanup, no flushed buffers."""
    os._exit(EXIT_STATUS)
