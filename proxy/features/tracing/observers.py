"""What is written of each request beside its answer: a line of the access log, and OpenTelemetry spans."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from starlette.types import Scope

from proxy.features.tracing.settings import TracingSettings
from proxy.features.tracing.spans import Tracer
from proxy.http.connections import RefusedHead
from proxy.services import Beside, Observer, Services
from turnwise.errors import SettingsError
from turnwise.telemetry.logs import LineFile, timestamp
from turnwise.telemetry.requests import RequestContext
from turnwise.types import Json

if TYPE_CHECKING:
    from prometheus_client import Counter

    from proxy.metrics import Counted


log = logging.getLogger(__name__)
WARNING_SECONDS = 60.0
"""How often lost lines of the access log are logged."""


class AccessLog:
    """Appends one line of JSON for each request to a file; `-` is standard output.

    No request waits for the log's reader. A line that cannot be written is lost and counted, and its request is
    answered all the same.
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
        self._warned_at = -math.inf
        self._lines = LineFile(self._file, self._lose)

    def write(self, line: dict[str, Any]) -> None:
        self._lines.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def _lose(self, reason: str) -> None:
        self._count_lost()
        if time.monotonic() - self._warned_at > WARNING_SECONDS:
            self._warned_at = time.monotonic()
            log.warning("lines of the access log are lost: %s", reason)

    def close(self) -> None:
        """Close the file, after the lines that wait if they are written within `FLUSH_SECONDS`."""
        if self._lines.flush() and self._is_own:
            os.close(self._file)


def _open(path: Path) -> int:
    """Open a file to append to it; a FIFO for reading too, so that neither this nor a write waits for a reader."""
    access = os.O_RDWR if path.is_fifo() else os.O_WRONLY | os.O_CREAT
    return os.open(path, access | os.O_APPEND | os.O_NOCTTY, 0o600)


class Tracing(Beside):
    """Lets what is on see all requests."""

    counters: ClassVar[Mapping[str, Counted]] = {
        "lost_lines": (
            "turnwise_lost_access_log_lines",
            "Lines of the access log that could not be written, or that its reader was too slow for",
            (),
        ),
        "lost_spans": ("turnwise_lost_spans", "OpenTelemetry spans that the collector did not take", ()),
    }
    lost_lines: Counter
    lost_spans: Counter

    def __init__(self, services: Services) -> None:
        settings = services.settings
        assert isinstance(settings, TracingSettings)
        if settings.otlp_endpoint is not None:
            services.observers.append(_Spans(settings.otlp_endpoint, self))
        if settings.access_log is not None:
            services.observers.append(_Lines(settings.access_log, self))


class _Spans(Observer):
    def __init__(self, endpoint: str, tracing: Tracing) -> None:
        self._tracer = Tracer(endpoint, "turnwise-proxy", lambda number: tracing.lost_spans.inc(number))  # noqa: PLW0108  it is made later
        self.close = self._tracer.close  # type: ignore[method-assign]

    def begun(self, context: RequestContext, scope: Scope) -> RequestContext:
        return self._tracer.begin(context, scope["method"], scope["path"])

    def ended(self, context: RequestContext, scope: Scope, status: int | None, *_: float) -> None:
        assert context.trace is not None
        context.trace.end(_route(scope), status)


class _Lines(Observer):
    def __init__(self, path: Path, tracing: Tracing) -> None:
        self._log = AccessLog(path, lambda: tracing.lost_lines.inc())  # noqa: PLW0108  it is made later
        self.close = self._log.close  # type: ignore[method-assign]

    def ended(self, context: RequestContext, scope: Scope, status: int | None, num_bytes: int, seconds: float) -> None:
        """Write the request's line; the query is left out, because some clients send their key there."""
        client = scope.get("client")
        line: Json = {"time": timestamp(time.time()), "request_id": context.request_id, "trace_id": context.trace_id}
        line |= {"client": client[0] if client else None, "method": scope["method"], "path": scope["path"]}
        self._log.write(line | {"status": status, "seconds": round(seconds, 6), "bytes": num_bytes})

    def refused(self, head: RefusedHead) -> None:
        line: Json = {"time": timestamp(time.time()), "request_id": head.request_id, "trace_id": None}
        line |= {"client": head.client, "method": head.method, "path": head.path}
        self._log.write(line | {"status": head.status, "seconds": 0.0, "bytes": head.num_bytes})


def _route(scope: Scope) -> str:
    """Return the method and the path, with the names of its parameters instead of their values.

    A path without a route is left out, so that a trace's names are few.
    """
    if "path_params" not in scope:
        return str(scope["method"])
    names = {str(value): f"{{{name}}}" for name, value in scope["path_params"].items()}
    return f"{scope['method']} {'/'.join(names.get(part, part) for part in scope['path'].split('/'))}"
