"""Reads of versions' files that wait, fail or end their process, which is the proxy's reading process."""

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from support.waiting import WAIT_SECONDS

from turnwise.errors import BadCheckpoint


def stalling(place: str, answered: Path, read: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a read; one with this text among its arguments waits first, until the file `answered` exists."""
    deadline = time.monotonic() + WAIT_SECONDS
    while place in repr((arguments, options)) and not answered.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    return read(*arguments, **options)


def failing_to_open(name: str, left: Path, number: int, read: Callable[..., Any], *arguments: Any) -> Any:
    """Call a read that cannot open the weights of the directory `name`, as often as the file `left` says."""
    opened = Path.open

    def open_with_errors(self: Path, *given: Any, **options: Any) -> Any:
        if self.parent.name == name and self.suffix == ".safetensors" and (num_left := int(left.read_text())):
            left.write_text(str(num_left - 1))
            raise OSError(number, "Input/output error")
        return opened(self, *given, **options)

    with mock.patch.object(Path, "open", open_with_errors):
        return read(*arguments)


def fail(cause: OSError, *, as_bad: bool) -> None:
    if as_bad:
        raise BadCheckpoint("v1/config.json cannot be read") from cause
    raise cause


def end_own_process() -> None:
    signal.pthread_kill(threading.get_ident(), signal.SIGBUS)  # to this thread, so nothing is answered before
