"""Ends the whole process tree of a child, with what left its group, when the child or its parent ends, also by -9.

The kernel signals the guard when its parent ends, also after `kill -9`. The guard then sends SIGTERM to the child's
process group, after a deadline SIGKILL, and afterwards kills the descendants that left the group: as the subreaper it
is the parent of all orphaned descendants. It is run by its path in isolated mode and imports no other module of
Turnwise, so it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def guarded(command: Sequence[str], grace_seconds: float) -> list[str]:
    """Return the command line that runs a command under a guard, whose parent is this process."""
    return [sys.executable, "-I", "-S", __file__, str(grace_seconds), str(os.getpid()), *command]


def main(grace_seconds: float, parent: int, command: list[str]) -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    signal_on_parents_death(signal.SIGTERM)
    _adopt_orphans()
    if os.getppid() != parent:
        return 1
    child = os.fork()
    if child == 0:
        _become(command)
    with contextlib.suppress(OSError):
        # Parent and child both do it, so that the group exists before it is signalled.
        os.setpgid(child, child)
    try:
        return _watch(child, grace_seconds)
    finally:
        _signal_group(child, signal.SIGKILL)
        _end_descendants()


def _adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_descendants() -> None:
    """Kill and reap all remaining children; the orphans of a killed child become children and are killed next."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    path = f"/proc/self/task/{os.getpid()}/children"
    try:
        with open(path) as children:  # noqa: PTH123  pathlib takes longer to import than the guard to start
            return [int(pid) for pid in children.read().split()]
    except FileNotFoundError:
        return []


def signal_on_parents_death(number: signal.Signals) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def _become(command: list[str]) -> None:
    os.setpgid(0, 0)
    signal_on_parents_death(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    try:
        os.execvp(command[0], command)  # noqa: S606  the command is the supervisor's, no shell
    except OSError as error:
        os.write(2, f"cannot execute {command[0]!r}: {error.strerror}\n".encode())
        os._exit(127)


def _watch(child: int, grace_seconds: float) -> int:
    """Wait for the child's end and forward signals; return its exit status as a shell reports it."""
    deadline = float("inf")
    while True:
        status = _reap_until(child)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        left = deadline - time.monotonic()
        if left <= 0:
            _signal_group(child, signal.SIGKILL)
            deadline = float("inf")
        elif left == float("inf"):
            deadline = _pass_on(signal.sigwaitinfo(_WATCHED).si_signo, child, grace_seconds, deadline)
        elif received := signal.sigtimedwait(_WATCHED, left):
            deadline = _pass_on(received.si_signo, child, grace_seconds, deadline)


def _reap_until(child: int) -> int | None:
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            return status
        if ended == 0:
            return None


def _pass_on(number: int, child: int, grace_seconds: float, deadline: float) -> float:
    if number == signal.SIGCHLD:
        return deadline
    _signal_group(child, signal.SIGTERM)
    return min(deadline, time.monotonic() + grace_seconds)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
