"""The logs of a process, text or JSON, and how many lines are lost while nobody reads.

No caller of a log waits for its reader: a thread writes to pipes, terminals and sockets.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
import queue
import stat
import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, Literal, TypeVar

from turnwise.telemetry.requests import current_request

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
log = logging.getLogger(__name__)
LogFormat = Literal["text", "json"]
MAX_WAITING_LINES = 4000
FLUSH_SECONDS = 2.0
T = TypeVar("T")


def configure_logging(level: str, log_format: LogFormat) -> LogHandler | None:
    """Send the log lines of this process to stderr; return the handler, None where logging is configured already."""
    if logging.root.handlers or sys.__stderr__ is None:
        return None
    handler = LogHandler(sys.__stderr__.fileno())
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    return handler


class JsonFormatter(logging.Formatter):
    """Writes a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "pid": record.process,
        }
        context = current_request.get()
        if context is not None:
            line |= {"request_id": context.request_id, "trace_id": context.trace_id}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class LogHandler(logging.Handler):
    """Writes log records to a file descriptor; no caller waits for the reader of a pipe, a terminal or a socket.

    A line that cannot be written is lost and counted. The next line that can be written follows a line with the number
    of those that were lost.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.num_lost = 0
        self.count_lost: Callable[[], None] = lambda: None
        """Is called for each line that is lost, in any thread."""
        self._lines = LineFile(descriptor, self._lose)
        self._num_reported = 0
        self._count_lock = threading.RLock()
        """Reentrant: a signal handler or a finalizer that logs may interrupt the thread that holds it."""

    def emit(self, record: logging.LogRecord) -> None:
        num_lost = self.num_lost
        lines = self._encode(record)
        if num_new := num_lost - self._num_reported:
            text = "%d lines of this log before this one are lost: its reader was too slow, or the disk was full"
            lines = self._encode(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (num_new,), None)) + lines
        if self._lines.write(lines):
            self._num_reported = num_lost

    def flush(self) -> None:
        self._lines.flush()

    def _encode(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001  the outermost edge of logging: a wrong call fails no caller
            text = f"{record.pathname}:{record.lineno}: the log line cannot be formatted: {error!r}"
        return text.encode(errors="backslashreplace") + b"\n"

    def _lose(self, reason: str) -> None:  # noqa: ARG002  the next line reports it
        with self._count_lock:
            self.num_lost += 1
        self.count_lost()


class SlowLines(Generic[T]):
    """Hands lines in a thread of its own to `write`, which may wait for a reader; the process may end meanwhile."""

    def __init__(self, write: Callable[[T], object]) -> None:
        self._write = write
        self._waiting: queue.SimpleQueue[T | threading.Event] = queue.SimpleQueue()
        """Its `put` is reentrant, for a signal handler or a finalizer that logs."""
        threading.Thread(target=self._run, name="lines", daemon=True).start()

    def put(self, line: T) -> bool:
        """Return False if the line is lost, because `MAX_WAITING_LINES` wait already."""
        is_taken = self._waiting.qsize() < MAX_WAITING_LINES
        if is_taken:
            self._waiting.put(line)
        return is_taken

    def flush(self) -> bool:
        """Wait until the lines are written, `FLUSH_SECONDS` at most; return whether they are."""
        written = threading.Event()
        self._waiting.put(written)
        return written.wait(FLUSH_SECONDS)

    def _run(self) -> None:
        while True:
            line = self._waiting.get()
            if isinstance(line, threading.Event):
                line.set()
            else:
                self._write(line)


class LineFile:
    """Appends lines to an open file; another thread writes to a pipe, a terminal or a socket."""

    def __init__(self, descriptor: int, lose: Callable[[str], None]) -> None:
        """Start the thread where one is needed; `lose` is called with the reason of each lost write, in any thread."""
        self._descriptor = descriptor
        self._lose = lose
        self._is_torn = False
        self._slow = None if stat.S_ISREG(os.fstat(descriptor).st_mode) else SlowLines(self._append)

    def write(self, lines: bytes) -> bool:
        if self._slow is None:
            return self._append(lines)
        is_taken = self._slow.put(lines)
        if not is_taken:
            self._lose("its reader does not read them; restart it or leave it out")
        return is_taken

    def flush(self) -> bool:
        return self._slow is None or self._slow.flush()

    def _append(self, lines: bytes) -> bool:
        rest = b"\n" + lines if self._is_torn else lines
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
                self._is_torn = bool(rest)
        except OSError as error:
            self._lose(f"{error.strerror}; free the disk or leave it out")
            return False
        return True


def timestamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
