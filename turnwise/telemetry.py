"""Logs and traces of a process: log lines as text or JSON, the access log, and W3C trace context.

The context of the running request is a context variable: log lines and the request to the engine take its ids from
there, so that no function has to pass them on.
"""

from __future__ import annotations

import contextvars
import datetime
import json
import logging
import os
import random
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from turnwise.errors import SettingsError

if TYPE_CHECKING:
    from turnwise.tracing import RequestTrace

TEXT_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
log = logging.getLogger(__name__)
LogFormat = Literal["text", "json"]
SAMPLED = "01"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


class RequestContext(NamedTuple):
    """The ids of one request."""

    request_id: str
    trace_id: str
    """32 hex digits."""
    parent_id: str | None
    """The caller's span, 16 hex digits; None without a caller that traces."""
    span_id: str
    """This process's span, 16 hex digits."""
    flags: str = SAMPLED
    trace: RequestTrace | None = None
    """The request's OpenTelemetry spans; None unless they are exported."""

    @property
    def traceparent(self) -> str:
        """The header that passes the trace on."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags}"


current_request: contextvars.ContextVar[RequestContext | None] = contextvars.ContextVar("current_request", default=None)
"""The request that the running task serves; None outside of requests."""


def make_context(request_id: str, traceparent: str) -> RequestContext:
    """Return the context of a new request from its headers; a missing or malformed header is replaced."""
    match = _TRACEPARENT.fullmatch(traceparent)
    is_valid = match is not None and set(match[1]) != {"0"} and set(match[2]) != {"0"}
    given = _REQUEST_ID.fullmatch(request_id) is not None
    noise = random_hex(80)
    return RequestContext(
        request_id=request_id if given else noise[:32],
        trace_id=match[1] if match is not None and is_valid else noise[32:64],
        parent_id=match[2] if match is not None and is_valid else None,
        span_id=noise[64:80],
        flags=match[3] if match is not None and is_valid else SAMPLED,
    )


def random_hex(num_digits: int) -> str:
    """Return random hex digits for an id, which is no secret; this takes no system call."""
    return f"{random.getrandbits(4 * num_digits):0{num_digits}x}"


def configure_logging(level: str, log_format: LogFormat) -> None:
    """Send the log lines of this process to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.basicConfig(level=level.upper(), handlers=[handler])


class JsonFormatter(logging.Formatter):
    """Writes a log record as one line of JSON."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
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


class AccessLog:
    """Appends one line of JSON for each request to a file; `-` is standard output."""

    def __init__(self, path: Path) -> None:
        """Open the file.

        Raises:
            SettingsError: it cannot be written.
        """
        try:
            self._file = sys.stdout.fileno() if str(path) == "-" else _open(path)
        except OSError as error:
            raise SettingsError(f"cannot write the access log {str(path)!r}: {error.strerror}") from error
        self._is_own = str(path) != "-"
        self._is_failing = False

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; one system call, so that lines of several processes do not mix.

        A line that cannot be written, for example to a full disk, is lost: its request is answered all the same.
        """
        try:
            os.write(self._file, json.dumps(line, ensure_ascii=False).encode() + b"\n")
        except OSError as error:
            if not self._is_failing:
                log.warning("lines of the access log are lost: %s; free the disk or leave it out", error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False

    def close(self) -> None:
        """Close the file."""
        if self._is_own:
            os.close(self._file)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o640)


def timestamp(seconds: float) -> str:
    """Return an instant in UTC as ISO 8601, with milliseconds."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat(timespec="milliseconds")
