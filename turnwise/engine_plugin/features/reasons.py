"""Why an engine died: its answers to calls name the exception that ended it, and not vLLM's log alone."""

from __future__ import annotations

import functools
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

REASON_FILE = "TURNWISE_ENGINE_REASON"
"""Variable with the name of the file into which a process of the engine that dies writes why."""


def register() -> None:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.exceptions import EngineDeadError

    tell_why_it_died(EngineCoreProc, EngineDeadError)


def tell_why_it_died(core: type[Any], dead: type[Exception]) -> None:
    """Let the error of an engine that died name the exception that ended it.

    The first process of vLLM makes the file, and the others inherit its name. A `core` tells it that it dies, and it
    answers calls with `dead` then. From 0.33 on it answers with a text of its own, which gets the reason too.
    """
    if REASON_FILE not in os.environ:
        handle, os.environ[REASON_FILE] = tempfile.mkstemp(prefix="turnwise-engine-")
        os.close(handle)
    file = Path(os.environ[REASON_FILE])
    send, begin = core._send_engine_dead, dead.__init__  # noqa: SLF001  vLLM calls it where the exception is handled

    @functools.wraps(send)
    def write_and_send(self: Any) -> None:
        error = sys.exc_info()[1]
        file.write_text(f"{type(error).__name__}: {error}", encoding="utf-8")
        send(self)

    @functools.wraps(begin)
    def begin_with_reason(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        if file.is_file() and (reason := file.read_text(encoding="utf-8")):
            self.args = (f"{self.args[0]} {reason}", *self.args[1:])
            self.CLIENT_MESSAGE = self.args[0]

    core._send_engine_dead = write_and_send  # noqa: SLF001  as above
    dead.__init__ = begin_with_reason  # type: ignore[method-assign]
