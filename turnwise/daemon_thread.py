"""Calls of functions that may never return, in threads that do not keep the process alive."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


def call_in_daemon_thread(
    name: str, function: Callable[[], Any], finish: Callable[[Any, BaseException | None], None]
) -> None:
    """Call a function in its own thread; `asyncio.to_thread` would wait for a hanging one at the process's end.

    Args:
        name: Of the thread.
        function: The function.
        finish: Gets its result, or what it raised, on the running event loop; not called once the loop has ended.
    """
    loop = asyncio.get_running_loop()

    def call() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:  # noqa: BLE001  `finish` gets it
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody asks any more
            loop.call_soon_threadsafe(finish, result, failure)

    threading.Thread(target=call, name=name, daemon=True).start()
