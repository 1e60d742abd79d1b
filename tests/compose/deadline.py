"""Waits with a deadline: every wait of the check names its condition and its time limit."""

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class CheckError(Exception):
    """A check of the stack failed; `service` names the container whose log has the cause, if there is one."""

    def __init__(self, message: str, service: str | None = None) -> None:
        super().__init__(message)
        self.service = service


def wait_until(what: str, seconds: float, look: Callable[[], Found | None], *, service: str | None = None) -> Found:
    """Call `look` until it returns a value, and return that value.

    Raises:
        CheckError: it found nothing in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(1.0)
    raise CheckError(f"waited {seconds:.0f} s without success for {what}", service)
