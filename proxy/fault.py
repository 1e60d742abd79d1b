"""Named points of a call at which a test makes the proxy kill itself. In production they do nothing.

A crash is injected by name and count, not by a timer, so that a test hits the same stage of a call on any machine.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from turnwise.errors import SettingsError

POINTS = (
    "after_session_open",
    "before_engine",
    "mid_stream",
    "before_commit",
    "in_transaction",
    "after_commit_before_reply",
    "weights_received",
    "mid_reload",
)
"""In the order of a call, then those of a reload."""


class FaultPoints:
    """Kills the process at the n-th passage of one named point: `before_commit`, or `before_commit:3`."""

    def __init__(self, where: str | None = None, die: Callable[[], None] | None = None) -> None:
        name, _, count = (where or "").partition(":")
        if name and name not in POINTS:
            raise SettingsError(f"there is no fault point {name!r}; use one of {', '.join(POINTS)}")
        self._name = name
        self._left = int(count or 1)
        self._die = die or _kill
        self.point: Callable[[str], object] = self._pass if name else len
        """Call it at a named point; without a fault it is a builtin, which costs nothing."""

    def _pass(self, name: str) -> None:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                self._die()


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
