"""Wait for a condition with a deadline. Tests never rely on a fixed sleep."""

import time
from collections.abc import Callable
from typing import TypeVar

WAIT_SECONDS = 600.0
"""Deadline of what must happen: no machine is so busy that it takes as long. What never happens ends here."""
POLL_SECONDS = 0.02

Found = TypeVar("Found")


def wait_until(condition: Callable[[], Found], what: str, seconds: float = WAIT_SECONDS) -> Found:
    """Return what the condition returns as soon as that is true; `what` says it in words, for the failure."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"after {seconds:.0f} s it is still not true that {what}"
        time.sleep(POLL_SECONDS)
    return found


def assert_stays(condition: Callable[[], object], what: str, seconds: float = 1.0) -> None:
    """Check again and again, for a while, that a condition remains true: proof that something does not happen."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert condition(), f"no longer true: {what}"
        time.sleep(POLL_SECONDS)
