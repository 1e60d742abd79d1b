"""Commands and functions that may never end, or that load much: each runs where it can be left or ended.

A command has a time limit that ends its whole process tree. It runs under the guard (`guard.py`), so nothing that it
started outlives it or this process.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import multiprocessing
import re
import shlex
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from turnwise.errors import SettingsError
from turnwise.files import create_private
from turnwise.processes import guard

P = ParamSpec("P")
R = TypeVar("R")
GRACE_SECONDS = 5.0
_INTERPRETER = re.compile(r"(python|pypy|node|deno|bun|ruby|perl|php|bash|dash|zsh|sh)[0-9.]*")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended."""

    exit_status: int
    timed_out: bool
    seconds: float
    output: bytes = b""


async def run_limited(
    argv: Sequence[str],
    *,
    cwd: Path,
    environment: Mapping[str, str],
    log: Path,
    timeout_seconds: float | None,
    stdin: bytes | None = None,
    capture: bool = False,
    grace_seconds: float = GRACE_SECONDS,
) -> Ended:
    """Run a command and return how it ended.

    Standard error is appended to the log, and standard output unless it is captured. The environment is all that the
    command has. Without `stdin` its input is empty, and without `timeout_seconds` there is no limit. Where this call
    takes too long or is cancelled, `grace_seconds` is the time from the term signal to the kill.
    """
    started = time.monotonic()
    create_private(log)
    with log.open("ab") as written:
        process = await asyncio.create_subprocess_exec(
            *guard.guarded(argv, grace_seconds),
            cwd=cwd,
            env=dict(environment),
            stdin=asyncio.subprocess.DEVNULL if stdin is None else asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE if capture else written,
            stderr=written,
            start_new_session=True,
        )
    timed_out, output = False, b""
    try:
        async with asyncio.timeout(timeout_seconds):
            output = (await process.communicate(stdin))[0] or b""
    except TimeoutError:
        timed_out = True
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    code = process.returncode or 0
    return Ended(code if code >= 0 else 128 - code, timed_out, time.monotonic() - started, output)


def with_script(argv: Sequence[str], workdir: Path | None, *, of_template: bool = False) -> list[str]:
    """Return a command whose interpreter gets its script by an absolute path.

    Programs are found from this process's directory although they run in another one. So are scripts: `python agent.py`
    runs the `agent.py` of this directory, unless `workdir` holds a file of this name. That one is each run's own copy;
    with `of_template` it is the one in `workdir` itself, which no run can change.
    """
    if len(argv) < 2 or not _INTERPRETER.fullmatch(Path(argv[0]).name):
        return list(argv)
    script = Path(argv[1])
    if of_template and workdir is not None and not script.is_absolute() and (workdir / script).is_file():
        return [argv[0], str((workdir / script).absolute()), *argv[2:]]
    if script.is_absolute() or not script.is_file() or (workdir is not None and (workdir / script).exists()):
        return list(argv)
    return [argv[0], str(script.absolute()), *argv[2:]]


def split_command(text: str, setting: str) -> list[str]:
    """Split a command line as a shell does; a program given by a relative path is made absolute.

    Raises:
        SettingsError: it is empty, its quotes do not match, or there is no such program.
    """
    try:
        argv = shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"{setting} {text!r} cannot be split into words: {error}") from error
    if not argv:
        raise SettingsError(f"{setting} is empty; give a program and its arguments")
    return [find_program(argv[0], setting), *argv[1:]]


def find_program(name: str, setting: str) -> str:
    """Return the absolute path of a program.

    Raises:
        SettingsError: there is no such program, or it is not executable.
    """
    found = shutil.which(name)
    if found is not None:
        return str(Path(found).absolute())
    if Path(name).is_file():
        raise SettingsError(f"{setting}: {name!r} is not executable; run `chmod +x {shlex.quote(name)}`")
    raise SettingsError(f"{setting}: there is no program {name!r}; install it, or give its path")


def call_in_child(function: Callable[P, R], *arguments: P.args, **options: P.kwargs) -> R:
    """Return what a function returns in a fork of this process, or raise what it raises there.

    It is for what loads much and is needed for a moment. The trainer's settings load torch, a quarter of a gigabyte,
    and a supervisor that has checked them would keep it.
    """
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as child:
        return child.submit(function, *arguments, **options).result()


def call_in_daemon_thread(
    name: str, function: Callable[[], Any], finish: Callable[[Any, BaseException | None], None]
) -> None:
    """Call a function in its own thread; `asyncio.to_thread` would wait for a hanging one at the process's end.

    `finish` gets its result, or what it raised, on the running event loop; it is not called once the loop has ended.
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
