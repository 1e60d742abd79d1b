"""The inside of a warm worker of `turnwise run --call`: imports a function once and calls it for each run.

Functions run in threads. Coroutines of all runs share one event loop, so that they can share clients and connections.
The worker is started by its path and needs only the standard library, so the agent may have its own environment.
It reads one request per line from standard input and writes one answer per line to its original standard output; the
agent's own output goes to standard error.
"""

import asyncio
import contextlib
import importlib
import inspect
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TextIO

MAX_ANSWER_CHARS = 16 * 2**20
"""The parent reads lines of at most 64 MiB."""


@dataclass(frozen=True)
class Run:
    """One run; the second argument of the called function."""

    session_id: str
    base_url: str
    api_key: str
    model: str
    directory: str
    split: str
    run: int
    environment: dict[str, str]
    """Variables that SDKs read. They are not set, because the runs of one process share its environment."""


class Answers:
    """Writes answers, one line at a time, from any thread."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.dup(1), "w", encoding="utf-8")
        self._lock = threading.Lock()
        os.dup2(2, 1)

    def write(self, answer: dict[str, Any]) -> None:
        line = json.dumps(answer) + "\n"
        with self._lock:
            self._file.write(line)
            self._file.flush()


def take_requests() -> TextIO:
    """Return standard input, and leave an empty one: a program of the agent would read requests of other runs."""
    requests = os.fdopen(os.dup(0), encoding="utf-8")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return requests


def main(target: str, num_threads: int) -> int:
    answers = Answers()
    requests = take_requests()
    sys.path[0] = os.getcwd()  # noqa: PTH109  this file's own directory must not shadow the agent's modules
    try:
        function = load(target)
    except Exception as error:  # noqa: BLE001  the agent's module may fail in any way; the parent reports it
        answers.write({"failed": f"{type(error).__name__}: {error}"})
        return 1
    answers.write({"ready": True})
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    with ThreadPoolExecutor(num_threads) as threads:
        for line in requests:
            request = request_of(line)
            if request is None:
                sys.stderr.write(f"a line that is no request is left out: {line:.200}\n")
            else:
                threads.submit(serve, function, request, answers, loop)
    return 0


def request_of(line: str) -> dict[str, Any] | None:
    """Return a request of the parent; None for what a program of the agent wrote into its pipe by way of /proc."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    is_request = isinstance(found, dict) and isinstance(found.get("run"), dict) and {"id", "task"} <= found.keys()
    return found if is_request else None


def load(target: str) -> Any:
    """Import `module:function`.

    Raises:
        TypeError: the function cannot be called.
    """
    module, _, name = target.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    if not callable(function):
        raise TypeError(f"{target} cannot be called")
    return function


def serve(function: Any, request: dict[str, Any], answers: Answers, loop: asyncio.AbstractEventLoop) -> None:
    """Call the function for one run, await its coroutine in the loop if it returns one, and write its answer."""
    try:
        value = function(request["task"], Run(**request["run"]))
        if inspect.isawaitable(value):
            value = asyncio.run_coroutine_threadsafe(_awaited(value), loop).result()
        answer = {"id": request["id"], "value": json.loads(_json(value))}
    except (Exception, SystemExit) as error:  # noqa: BLE001  the agent is anybody's code; the run has its failure
        answer = {"id": request["id"], "error": f"{type(error).__name__}: {error}"[:MAX_ANSWER_CHARS]}
    with contextlib.suppress(BrokenPipeError):
        answers.write(answer)


async def _awaited(value: Any) -> Any:
    try:
        return await value
    except SystemExit as error:  # it would end the loop of all runs
        raise RuntimeError(f"SystemExit: {error}") from error


def _json(value: Any) -> str:
    """Return a value as JSON, also numbers, booleans and arrays of NumPy and PyTorch.

    Raises:
        TypeError, ValueError: it is no JSON value, or too long for an answer.
    """
    text = json.dumps(value, default=_plain)
    if len(text) > MAX_ANSWER_CHARS:
        raise ValueError(f"it returned {len(text)} characters of JSON; at most {MAX_ANSWER_CHARS} are taken")
    return text


def _plain(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"it returned {value!r:.200}, which is no JSON value")
    return value.tolist()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
