"""Whether a process that starts makes progress: its log grows, or its processes compute or read from a disk.

A start has no fixed time: a slow machine, a large model and a first compilation take many minutes. Waiting ends where
nothing happens any more, or at a limit, because a process may also compute without an end.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path

from turnwise.processes.ports import processes_of

LOOK_SECONDS = 1.0
STALLED_SHARE = 0.1
"""Part of the limit after which a process that shows no progress is given up."""
_LEAST_CORES = 0.02
"""CPU time per second that is work; a process that only waits polls with less."""
_UTIME, _CSTIME, _MAJFLT = 11, 15, 9
"""Fields of /proc/PID/stat behind the program's name."""
_SHOWN_CHARACTERS = 160


class Progress:
    """What one start has shown."""

    def __init__(self, log_path: Path, log_start: int) -> None:
        """Begin to wait for a process; its log begins at `log_start`, bytes."""
        self.since = self._seen_at = self._looked_at = time.monotonic()
        self._log_path, self._log_start = log_path, log_start
        self._log_size, self._work, self._cores = log_start, (0.0, 0), 0.0

    def look(self, session: int) -> None:
        """Look at the log and at the processes of a session, at most once a second."""
        now = time.monotonic()
        elapsed = now - self._looked_at
        if elapsed < LOOK_SECONDS:
            return
        size, work = self._log_path.stat().st_size, _work_of(session)
        self._cores = max(0.0, work[0] - self._work[0]) / elapsed
        if size > self._log_size or self._cores >= _LEAST_CORES or work[1] > self._work[1] or sys.platform != "linux":
            self._seen_at = now
        self._looked_at, self._log_size, self._work = now, size, work

    def problem(self, limit_seconds: float) -> str | None:
        """Return why waiting ends; None while it goes on."""
        now = time.monotonic()
        if now - self.since > limit_seconds:
            return f"is not ready after {limit_seconds:.0f} s ({self.describe()})"
        if now - self._seen_at > limit_seconds * STALLED_SHARE:
            return f"is not ready after {now - self.since:.0f} s and makes no progress ({self.describe()})"
        return None

    def describe(self) -> str:
        """Return what the process does."""
        idle = time.monotonic() - self._seen_at
        if idle > 2 * LOOK_SECONDS:
            doing = f"its log does not grow and it computes nothing, for {idle:.0f} s"
        else:
            doing = f"it computes on {self._cores:.1f} cores" if self._cores >= _LEAST_CORES else "it works"
        last = self._last_line()
        return f"{doing}; its log ends with {last!r}" if last else f"{doing}; its log is empty"

    def _last_line(self) -> str:
        with self._log_path.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - 4096))
            lines = log.read().decode(errors="replace").replace("\r", "\n").strip().splitlines()
        return lines[-1].strip()[-_SHOWN_CHARACTERS:] if lines else ""


def _work_of(session: int) -> tuple[float, int]:
    """Return CPU seconds and major page faults of a session's processes, the time of ended children included."""
    ticks = faults = 0
    for process in processes_of(session):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[_UTIME:_CSTIME]))
            faults += int(fields[_MAJFLT])
    return ticks / os.sysconf("SC_CLK_TCK"), faults
