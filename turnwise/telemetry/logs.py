"""The logs of a process: log lines as text or JSON, and the access log.

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
from pathlib import Path
from typing import Any, Literal

from turnwise.errors import SettingsError
from turnwise.telemetry.tracing import current_request

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
log = logging.getLogger(__name__)
LogFormat = Literal["text", "json"]
MAX_QUEUED_BYTES = 2**20
"""Lines of a log that wait for its reader, some 4,000."""
CLOSE_SECONDS = 2.0


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
        self._lines = _LineFile(descriptor, self._lose)
        self._num_unreported = 0
        self._count_lock = threading.RLock()
        """Reentrant: a signal handler or a finalizer that logs may interrupt the thread that holds it."""

    def emit(self, record: logging.LogRecord) -> None:
        num_lost = self._num_unreported
        lines = self._encode(record)
        if num_lost:
            text = "%d lines of this log before this one are lost: its reader was too slow, or the disk was full"
            lines = self._encode(logging.LogRecord(__name__, logging.WARNING, "", 0, text, (num_lost,), None)) + lines
        if self._lines.write(lines):
            with self._count_lock:
                self._num_unreported -= num_lost

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        super().close()

    def _encode(self, record: logging.LogRecord) -> bytes:
        try:
            text = self.format(record)
        except Exception as error:  # noqa: BLE001  the outermost edge of logging: a wrong call fails no caller
            text = f"{record.pathname}:{record.lineno}: the log line cannot be formatted: {error!r}"
        return text.encode(errors="backslashreplace") + b"\n"

    def _lose(self, reason: str | None) -> None:  # noqa: ARG002  the next line reports it
        with self._count_lock:
            self._num_unreported += 1
            self.num_lost += 1
        self.count_lost()


class AccessLog:
    """Appends one line of JSON for each request to a file; `-` is standard output.

    A request never waits for the reader of a pipe, a terminal or a socket: another thread writes to these. A line that
    cannot be written, for example to a full disk, is lost and counted, and its request is answered all the same.
    """

    def __init__(self, path: Path, count_lost: Callable[[], None]) -> None:
        """Open the file; `count_lost` is called for each line that is lost, in any thread.

        Raises:
            SettingsError: it cannot be written.
        """
        try:
            self._file = sys.stdout.fileno() if str(path) == "-" else _open(path)
        except OSError as error:
            raise SettingsError(f"cannot write the access log {str(path)!r}: {error.strerror}") from error
        self._is_own = str(path) != "-"
        self._count_lost = count_lost
        self._lines = _LineFile(self._file, self._lose)

    def write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def _lose(self, reason: str | None) -> None:
        self._count_lost()
        if reason is not None:
            log.warning("lines of the access log are lost: %s", reason)

    def close(self) -> None:
        """Close the file, after the lines that wait if they are written within `CLOSE_SECONDS`."""
        is_written = self._lines.close()
        if self._is_own and is_written:
            os.close(self._file)


class _LineFile:
    """Appends lines to an open file; a thread of its own writes to a pipe, a terminal or a socket."""

    def __init__(self, descriptor: int, lose: Callable[[str | None], None]) -> None:
        """Start the thread where one is needed.

        `lose` is called for each write that is lost, in any thread: with the reason for the first of several in a row,
        with None for the others.
        """
        self._descriptor = descriptor
        self._lose = lose
        self._is_failing = False
        self._is_torn = False
        self._is_overflowing = False
        self._queue = None if stat.S_ISREG(os.fstat(descriptor).st_mode) else _LineQueue(self._append)

    def write(self, lines: bytes) -> bool:
        if self._queue is None:
            return self._append(lines)
        self._is_overflowing = self._is_overflowing and not self._queue.is_empty
        if self._queue.put(lines):
            return True
        self._lose(None if self._is_overflowing else "its reader does not read them; restart it or leave it out")
        self._is_overflowing = True
        return False

    def flush(self) -> None:
        if self._queue is not None:
            self._queue.flush()

    def close(self) -> bool:
        return self._queue is None or self._queue.close()

    def _append(self, lines: bytes) -> bool:
        rest = b"\n" + lines if self._is_torn else lines
        try:
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
                self._is_torn = bool(rest)
        except OSError as error:
            is_first, self._is_failing = not self._is_failing, True
            self._lose(f"{error.strerror}; free the disk or leave it out" if is_first else None)
            return False
        self._is_failing = False
        return True


class _LineQueue:
    """Lines that a thread of its own writes; at most `MAX_QUEUED_BYTES` wait."""

    def __init__(self, append: Callable[[bytes], object]) -> None:
        self._append = append
        self._lines: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._num_put = 0
        self._num_done = 0
        self._thread = threading.Thread(target=self._run, name="log lines", daemon=True)
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        return self._num_put == self._num_done

    def put(self, line: bytes) -> bool:
        if self._num_put - self._num_done + len(line) > MAX_QUEUED_BYTES:
            return False
        self._num_put += len(line)
        self._lines.put(line)
        return True

    def flush(self) -> None:
        if self._thread.is_alive():
            written = threading.Event()
            self._lines.put(written)
            written.wait(CLOSE_SECONDS)

    def close(self) -> bool:
        self._lines.put(None)
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            self._append(line)
            self._num_done += len(line)


def _open(path: Path) -> int:
    """Open a file to append to it; a FIFO for reading too, so that neither this nor a write waits for a reader."""
    access = os.O_RDWR if path.is_fifo() else os.O_WRONLY | os.O_CREAT
    return os.open(path, access | os.O_APPEND | os.O_NOCTTY, 0o640)


def timestamp(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
