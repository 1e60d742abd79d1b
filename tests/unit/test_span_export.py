"""Each ended span is exported or counted as lost."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from support.waiting import wait_until

from turnwise.telemetry.span_export import BATCH_SPANS, MAX_WAITING, CountingSpanProcessor


class HeldExporter(SpanExporter):
    def __init__(self, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.released = threading.Event()
        self.num_begun = 0
        self.num_exported = 0
        self._result = result

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_begun += len(spans)
        self.released.wait()
        self.num_exported += len(spans)
        return self._result


def tracing(exporter: SpanExporter, lost: list[int], close_seconds: float = 60.0) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(CountingSpanProcessor(exporter, lost.append, close_seconds))
    return provider


def end_spans(provider: TracerProvider, count: int) -> None:
    tracer = provider.get_tracer("test")
    for _ in range(count):
        tracer.start_span("span").end()


def test_spans_beyond_what_may_wait_for_a_slow_collector_are_counted() -> None:
    """One batch is on its way, 2,048 spans wait, and seven are lost."""
    exporter, lost = HeldExporter(), []
    provider = tracing(exporter, lost)
    end_spans(provider, BATCH_SPANS)
    wait_until(lambda: exporter.num_begun > 0, "the first export begins")
    num_waiting = BATCH_SPANS - exporter.num_begun
    end_spans(provider, MAX_WAITING - num_waiting + 7)
    assert sum(lost) == 7
    exporter.released.set()
    provider.shutdown()
    assert exporter.num_exported == BATCH_SPANS + MAX_WAITING - num_waiting
    assert sum(lost) == 7


def test_spans_of_an_exporter_that_raises_are_counted_and_later_ones_are_exported() -> None:
    class Failing(HeldExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            if not self.released.is_set():
                raise RuntimeError("no connection")
            return super().export(spans)

    exporter, lost = Failing(), []
    provider = tracing(exporter, lost)
    end_spans(provider, 3)
    wait_until(lambda: sum(lost) == 3, "the spans are counted")
    exporter.released.set()
    end_spans(provider, 2)
    provider.shutdown()
    assert (exporter.num_exported, sum(lost)) == (2, 3)
