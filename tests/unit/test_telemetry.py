"""Log lines and spans that nobody takes delay nothing and are counted."""

import json
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from support.waiting import wait_until

from turnwise.telemetry.logs import MAX_QUEUED_BYTES, AccessLog
from turnwise.telemetry.span_export import BATCH_SPANS, MAX_WAITING, CountingSpanProcessor

LINE = {"path": "/" + "x" * 1_000}


@pytest.fixture
def lost() -> list[int]:
    return []


def test_a_full_disk_loses_lines_and_is_reported_once(caplog, tmp_path, lost):
    """Otherwise each reply would end with a traceback and a closed connection."""
    log = AccessLog(Path("/dev/full"), lambda: lost.append(1))
    with caplog.at_level(logging.WARNING):
        log.write({"path": "/a"})
        log.write({"path": "/b"})
        log.close()
    assert len(lost) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "lines of the access log are lost: No space left on device; free the disk or leave it out"
    ]
    good = AccessLog(tmp_path / "log", lambda: lost.append(1))
    good.write({"path": "/c"})
    assert (tmp_path / "log").read_text() == '{"path": "/c"}\n'
    good.close()
    assert len(lost) == 2


def test_a_pipe_that_nobody_reads_delays_no_line_and_the_rest_is_counted(caplog, tmp_path, lost):
    """Each line is then either read later or counted as lost."""
    os.mkfifo(tmp_path / "pipe")
    log = AccessLog(tmp_path / "pipe", lambda: lost.append(1))
    num_lines = 2 * MAX_QUEUED_BYTES // 1_000
    with caplog.at_level(logging.WARNING):
        for _ in range(num_lines):
            log.write(LINE)
        wait_until(lambda: caplog.records, "the loss is logged")
    assert [record.getMessage() for record in caplog.records] == [
        "lines of the access log are lost: its reader does not read them; restart it or leave it out"
    ]
    assert num_lines / 3 < len(lost) < num_lines
    with (tmp_path / "pipe").open("rb") as reader:
        read = [json.loads(reader.readline()) for _ in range(num_lines - len(lost))]
    assert read == [LINE] * len(read)
    num_lost = len(lost)
    log.write(LINE)
    log.close()
    assert len(lost) == num_lost


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


def tracing(exporter: SpanExporter, lost: list[int]) -> TracerProvider:
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(CountingSpanProcessor(exporter, lost.append, 60.0))
    return provider


def end_spans(provider: TracerProvider, count: int) -> None:
    tracer = provider.get_tracer("test")
    for _ in range(count):
        tracer.start_span("span").end()


def test_spans_beyond_what_may_wait_for_a_slow_collector_are_counted():
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


def test_spans_of_an_exporter_that_raises_are_counted_and_later_ones_are_exported():
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
