"""A process between a parent and its child that ends the child's whole process tree when either of them ends.

The kernel signals the guard when its parent is gone, also after `kill -9`. The guard then ends the child's process
group with a term signal, a deadline and a kill, and afterwards kills the descendants that left the group: as the
subreaper it is the parent of all orphans below it. It is run by its path, isolated, and imports nothing of ours, so it
starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time

_PR_SET_PDEATHSIG = 1
"""Linux's prctl option: the signal that a process gets when its parent is gone."""
_PR_SET_CHILD_SUBREAPER = 36
"""Linux's prctl option: orphaned descendants become children of this process."""
_WATCHED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD}


def main(grace_seconds: float, parent: int, command: list[str]) -> int:
    """Run a command as a process group of its own until it ends, or until it has to.

    Args:
        grace_seconds: From the term signal to the kill.
        parent: Process id of the supervisor.
        command: Program and arguments.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    signal_on_parents_death(signal.SIGTERM)
    _adopt_orphans()
    if os.getppid() != parent:
        return 1
    child = os.fork()
    if child == 0:
        _become(command)
    with contextlib.suppress(OSError):
        # Both sides do it: whichever runs first, the group exists before anyone signals it.
        os.setpgid(child, child)
    try:
        return _watch(child, grace_seconds)
    finally:
        _signal_group(child, signal.SIGKILL)
        _end_descendants()


def _adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def _end_descendants() -> None:
    """Kill and reap every remaining child; the orphans that a kill leaves behind become children and are next."""
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    """Return the process ids of this process's children; empty where the system has no /proc."""
    path = f"/proc/self/task/{os.getpid()}/children"
    try:
        with open(path) as children:  # noqa: PTH123  pathlib takes longer to import than the guard to start
            return [int(pid) for pid in children.read().split()]
    except FileNotFoundError:
        return []


def signal_on_parents_death(number: signal.Signals) -> None:
    """Ask the kernel for a signal when the parent is gone; only Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)


def _become(command: list[str]) -> None:
    """Become the command, in the forked process."""
    os.setpgid(0, 0)
    signal_on_parents_death(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    try:
        os.execvp(command[0], command)  # noqa: S606  the command is the supervisor's, no shell
    except OSError as error:
        os.write(2, f"cannot execute {command[0]!r}: {error.strerror}\n".encode())
        os._exit(127)


def _watch(child: int, grace_seconds: float) -> int:
    """Wait for the child's end and pass the signals on; return its exit status, as a shell counts it."""
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
    """Reap orphans that ended; return the child's wait status once it has ended."""
    while True:
        ended, status = os.waitpid(-1, os.WNOHANG)
        if ended == child:
            return status
        if ended == 0:
            return None


def _pass_on(number: int, child: int, grace_seconds: float, deadline: float) -> float:
    """Pass a signal to the child's group; return when its time is up."""
    if number == signal.SIGCHLD:
        return deadline
    _signal_group(child, signal.SIGTERM)
    return min(deadline, time.monotonic() + grace_seconds)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))
