"""The OpenTelemetry spans of a request: the request itself, the engine's part, and the commit.

The SDK is an optional dependency, the extra `otel`. It is imported when a tracer is created; a process without one
neither imports it nor spends time on spans. Its thread exports spans in batches, over OTLP/HTTP.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import turnwise
from turnwise.errors import SettingsError
from turnwise.installed import install_command
from turnwise.telemetry.requests import RequestContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExportResult
    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

COLLECTOR_SECONDS = 5
EXPORT_SECONDS = 1.0


class Tracer:
    """Starts the spans of requests, and exports them to a collector."""

    def __init__(self, endpoint: str, service: str, count_lost: Callable[[int], None]) -> None:
        """Start the exporting thread; `count_lost` is called with each number of spans that the collector did not take.

        Raises:
            SettingsError: OpenTelemetry is not installed.
        """
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
        except ImportError as error:
            raise SettingsError(f"traces need OpenTelemetry ({error}); run `{install_command('otel')}`") from error

        class CountingExporter(OTLPSpanExporter):
            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                result = super().export(spans)
                if result is not SpanExportResult.SUCCESS:
                    count_lost(len(spans))
                return result

        exporter = CountingExporter(f"{endpoint.rstrip('/')}/v1/traces", timeout=COLLECTOR_SECONDS)
        attributes = {"service.name": service, "service.version": turnwise.__version__}
        self._provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000 * EXPORT_SECONDS))
        self._tracer = self._provider.get_tracer("turnwise", turnwise.__version__)
        self._trace = trace

    def begin(self, context: RequestContext, method: str, path: str) -> RequestContext:
        """Start a request's span, as a child of the caller's span if there is one; return the context with its ids."""
        trace = self._trace
        parent = None
        if context.parent_id is not None:
            remote = trace.SpanContext(
                int(context.trace_id, 16), int(context.parent_id, 16), True, trace.TraceFlags(int(context.flags, 16))
            )
            parent = trace.set_span_in_context(trace.NonRecordingSpan(remote))
        span = self._tracer.start_span(
            method,
            parent,
            trace.SpanKind.SERVER,
            {"http.request.method": method, "url.path": path, "turnwise.request_id": context.request_id},
        )
        return RequestContext(
            request_id=context.request_id,
            parent_id=context.parent_id,
            trace=RequestTrace(self, span),
            **_ids(span),
        )

    def start_child(self, name: str, parent: Span, *, is_call: bool = False) -> Span:
        kind = self._trace.SpanKind.CLIENT if is_call else self._trace.SpanKind.INTERNAL
        return self._tracer.start_span(name, self._trace.set_span_in_context(parent), kind)

    def fail(self, span: Span, message: str) -> None:
        span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, message))

    def close(self) -> None:
        """Export what waits, within `COLLECTOR_SECONDS`: the SDK's own shutdown waits for half a minute."""
        closing = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        closing.start()
        closing.join(COLLECTOR_SECONDS)


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._engine_span: Span | None = None

    def start_engine(self, url: str) -> str:
        """Start the engine's span; it ends with the commit, or where the call is sent again.

        Return the header that passes the trace on.
        """
        self._end_engine()
        self._engine_span = self._tracer.start_child("engine", self._span, is_call=True)
        self._engine_span.set_attribute("url.full", url)
        ids = _ids(self._engine_span)
        return f"00-{ids['trace_id']}-{ids['span_id']}-{ids['flags']}"

    @contextlib.contextmanager
    def commit(self, attributes: Mapping[str, AttributeValue]) -> Iterator[None]:
        self._end_engine()
        span = self._tracer.start_child("commit", self._span)
        span.set_attributes(attributes)
        self._span.set_attributes(attributes)
        try:
            yield
        except Exception as error:
            self._tracer.fail(span, str(error))
            raise
        finally:
            span.end()

    def end(self, route: str, status: int | None) -> None:
        """End the request's span; without a status the client left before the reply began."""
        self._end_engine()
        self._span.update_name(route)
        self._span.set_attribute("http.route", route.partition(" ")[2])
        if status is not None:
            self._span.set_attribute("http.response.status_code", status)
        if status is None or status >= 500:
            self._tracer.fail(self._span, "no reply" if status is None else f"status {status}")
        self._span.end()

    def _end_engine(self) -> None:
        if self._engine_span is not None:
            self._engine_span.end()
            self._engine_span = None


def _ids(span: Span) -> dict[str, str]:
    ids = span.get_span_context()
    return {"trace_id": f"{ids.trace_id:032x}", "span_id": f"{ids.span_id:016x}", "flags": f"{ids.trace_flags:02x}"}
