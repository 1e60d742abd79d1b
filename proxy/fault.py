"""Named points of a call at which a test lets the proxy die. In service they do nothing.

One decision: a crash is injected by name and count, never by a timer, so that each stage of a call is hit exactly and
the test is the same on a slow machine. The points, in the order of a call: `after_session_open`, `before_engine`,
`mid_stream`, `before_commit`, `in_transaction`, `after_commit_before_reply`; and in a reload `mid_reload`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

POINTS = (
    "after_session_open",
    "before_engine",
    "mid_stream",
    "before_commit",
    "in_transaction",
    "after_commit_before_reply",
    "mid_reload",
)


class FaultPoints:
    """Dies at the n-th passage of one named point: `before_commit`, or `before_commit:3`."""

    def __init__(self, where: str | None = None, die: Callable[[], None] | None = None) -> None:
        name, _, count = (where or "").partition(":")
        self._name = name
        self._left = int(count or 1)
        self._die = die or _kill

    def point(self, name: str) -> None:
        """Pass a point: nothing happens unless it is the one to die at."""
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                self._die()


def _kill() -> None:
    """Leave as under `kill -9`: no cleanup, no flushed buffers, whichever thread got here."""
    os.kill(os.getpid(), signal.SIGKILL)
