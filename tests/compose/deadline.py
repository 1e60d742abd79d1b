"""Waiting with an end: every wait of the check names what it waits for and how long it may take."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


class CheckError(Exception):
    """The stack did not do what it must; `service` names the container whose log tells why, where one does."""

    def __init__(self, message: str, service: str | None = None) -> None:
        super().__init__(message)
        self.service = service


def wait_until(what: str, seconds: float, look: Callable[[], Found | None], *, service: str | None = None) -> Found:
    """Return what `look` finds as soon as it finds something.

    Raises:
        CheckError: it found nothing in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        found = look()
        if found:
            return found
        time.sleep(1.0)
    raise CheckError(f"waited {seconds:.0f} s in vain for {what}", service)
