"""Exports ended OpenTelemetry spans in batches from its own thread, and counts the spans that are lost.

The SDK's own processor drops spans without a count. Only a process that exports spans imports this module.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)
EXPORT_SECONDS = 1.0
BATCH_SPANS = 512
MAX_WAITING = 2048


class CountingSpanProcessor(SpanProcessor):
    """Passes ended spans to an exporter."""

    def __init__(self, exporter: SpanExporter, count_lost: Callable[[int], None], close_seconds: float) -> None:
        """Start the exporting thread.

        `count_lost` is called with each number of lost spans, in any thread; the end of the process waits
        `close_seconds` for the last exports.
        """
        self._exporter = exporter
        self._count_lost = count_lost
        self._close_seconds = close_seconds
        self._waiting: collections.deque[ReadableSpan] = collections.deque()
        self._is_closing = False
        self._num_in_flight = 0
        self._in_flight_lock = threading.Lock()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="span export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None: ...

    def on_end(self, span: ReadableSpan) -> None:
        context = span.get_span_context()
        if context is None or not context.trace_flags.sampled:
            return
        if self._is_closing or len(self._waiting) >= MAX_WAITING:
            self._count_lost(1)
            return
        self._waiting.append(span)
        if len(self._waiting) >= BATCH_SPANS:
            self._wake.set()

    def shutdown(self) -> None:
        """Export what waits, within `close_seconds`; count the rest as lost."""
        self._is_closing = True
        self._wake.set()
        self._thread.join(self._close_seconds)
        self._exporter.shutdown()
        if num_left := self._take_in_flight() + len(self._waiting):
            self._waiting.clear()
            self._count_lost(num_left)
            log.warning("%d spans were not exported before the end of the process", num_left)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        deadline = time.monotonic() + timeout_millis / 1000
        while self._waiting and time.monotonic() < deadline:
            self._wake.set()
            time.sleep(0.01)
        return not self._waiting

    def _run(self) -> None:
        while not self._is_closing:
            self._wake.wait(EXPORT_SECONDS)
            self._wake.clear()
            self._export_waiting()
        self._export_waiting()

    def _export_waiting(self) -> None:
        while batch := [self._waiting.popleft() for _ in range(min(BATCH_SPANS, len(self._waiting)))]:
            self._num_in_flight = len(batch)
            is_exported = self._export(batch)
            num_ended = self._take_in_flight()
            if num_ended and not is_exported:
                self._count_lost(num_ended)

    def _export(self, batch: list[ReadableSpan]) -> bool:
        try:
            return self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:  # any exporter: the thread continues with the next batch
            log.exception("%d spans are lost: their exporter failed", len(batch))
            return False

    def _take_in_flight(self) -> int:
        """Return how many spans are in flight; they are counted here or by the other thread, not by both."""
        with self._in_flight_lock:
            num_taken, self._num_in_flight = self._num_in_flight, 0
        return num_taken
