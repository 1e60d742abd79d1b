"""OpenTelemetry spans, as a collector receives them over OTLP/HTTP."""

import gzip
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx2
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.control_plane import metric
from support.servers import serving
from support.waiting import WAIT_SECONDS, wait_until
from turnwise_fake_engine import Fault, FaultKind

from proxy.features.tracing.spans import Tracer
from turnwise.telemetry.requests import make_context

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hello."}]}
SERVER_KIND, CLIENT_KIND = 2, 3
ERROR = 2


class Collector:
    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    raw = gzip.decompress(raw)
                assert self.path == "/v1/traces"
                for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Write nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def of_trace(self, trace_id: str, count: int) -> dict[str, Any]:
        """Wait for the spans of a trace; return them by name."""
        wait_until(lambda: len(self._find(trace_id)) >= count, f"{count} spans of {trace_id} arrive")
        return {span.name: span for span in self._find(trace_id)}

    def _find(self, trace_id: str) -> list[Any]:
        return [span for span in self.spans if span.trace_id.hex() == trace_id]


@pytest.fixture
def collector() -> Iterator[Collector]:
    running = Collector()
    with serving(running.server):
        yield running


def attributes(span: Any) -> dict[str, Any]:
    return {each.key: each.value.string_value or each.value.int_value for each in span.attributes}


def test_a_call_is_a_trace_of_request_engine_and_commit_inside_the_callers_span(fake_engine, start_proxy, collector):
    """Whole and streamed; the engine gets its own span as the parent. A trace that is not sampled is not exported."""
    proxy = start_proxy(fake_engine.url, "--otlp-endpoint", collector.url)
    fake_engine.calls.clear()
    url = proxy.session_v1("s") + "/chat/completions"
    for number, stream in enumerate([False, True]):
        trace_id = f"{TRACE[:-1]}{number}"
        reply = httpx2.post(url, json={**CHAT, "stream": stream}, headers=sent(trace_id))
        assert reply.status_code == 200
        spans = collector.of_trace(trace_id, 3)
        request, engine, commit = (
            spans[name] for name in ("POST /sessions/{session_id}/v1/chat/completions", "engine", "commit")
        )
        assert (request.kind, engine.kind) == (SERVER_KIND, CLIENT_KIND)
        assert request.parent_span_id.hex() == CALLER
        assert {engine.parent_span_id, commit.parent_span_id} == {request.span_id}
        assert request.start_time_unix_nano <= engine.start_time_unix_nano < engine.end_time_unix_nano
        assert engine.end_time_unix_nano <= commit.start_time_unix_nano < commit.end_time_unix_nano
        assert commit.end_time_unix_nano <= request.end_time_unix_nano
        passed_on = fake_engine.calls[number].headers["traceparent"]
        assert passed_on == f"00-{trace_id}-{engine.span_id.hex()}-01"
        turn = proxy.turns("s")[number].turn
        named = attributes(request)
        assert named["http.response.status_code"] == 200
        assert (named["turnwise.session_id"], named["turnwise.turn_id"]) == ("s", turn.turn_id)
    unsampled = "1" * 32
    httpx2.post(url, json=CHAT, headers={"traceparent": f"00-{unsampled}-{CALLER}-00"}).raise_for_status()
    assert fake_engine.calls[2].headers["traceparent"].startswith(f"00-{unsampled}-")
    assert fake_engine.calls[2].headers["traceparent"].endswith("-00")
    httpx2.get(f"{proxy.url}/v1/sessions/s", headers=sent("2" * 32)).raise_for_status()
    assert list(collector.of_trace("2" * 32, 1)) == ["GET /v1/sessions/{session_id}"]
    assert not [span for span in collector.spans if span.trace_id.hex() == unsampled]


def test_a_failed_call_is_a_failed_span(fake_engine, start_proxy, collector):
    """It is exported at the latest when the proxy ends."""
    proxy = start_proxy(fake_engine.url, "--otlp-endpoint", collector.url)
    fake_engine.state.script.faults.append(Fault(kind=FaultKind.STATUS, status=500))
    reply = httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT, headers=sent(TRACE))
    assert reply.status_code == 500
    proxy.process.terminate()
    proxy.process.wait(WAIT_SECONDS)
    spans = collector.of_trace(TRACE, 3)
    assert spans["POST /v1/chat/completions"].status.code == ERROR


def test_a_call_that_is_sent_again_has_a_span_of_each_engine(collector):
    tracer = Tracer(collector.url, "turnwise", lambda _: None)
    context = tracer.begin(make_context("", ""), "POST", "/v1/chat/completions")
    for url in ("http://lost", "http://other"):
        assert context.trace.start_engine(url)
    context.trace.end("POST /v1/chat/completions", 200)
    tracer.close()
    engines = [attributes(span)["url.full"] for span in collector.spans if span.name == "engine"]
    assert engines == ["http://lost", "http://other"]


def test_calls_succeed_while_the_collector_is_unreachable(fake_engine, start_proxy):
    proxy = start_proxy(fake_engine.url, "--otlp-endpoint", "http://127.0.0.1:9")
    assert httpx2.post(f"{proxy.v1}/chat/completions", json=CHAT, headers=sent(TRACE)).status_code == 200
    # The call's three spans, besides those of the requests that waited until the proxy was ready.
    wait_until(lambda: metric(proxy, "turnwise_lost_spans_total") >= 3, "the lost spans are counted")
    proxy.kill()  # its end would wait for the collector


def test_a_collector_that_does_not_answer_delays_no_stop(monkeypatch):
    """The SDK's own shutdown waits for half a minute, and goes on when the stop is over."""
    monkeypatch.setattr("proxy.features.tracing.spans.COLLECTOR_SECONDS", WAIT_SECONDS)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        tracer = Tracer(f"http://127.0.0.1:{silent.getsockname()[1]}", "test", lambda _: None)
        context = tracer.begin(make_context("", ""), "GET", "/")
        context.trace.end("GET /", 200)
        monkeypatch.setattr("proxy.features.tracing.spans.COLLECTOR_SECONDS", 0.1)
        tracer.close()
        assert "last spans" in {thread.name for thread in threading.enumerate()}


def sent(trace_id: str) -> dict[str, str]:
    return {"traceparent": f"00-{trace_id}-{CALLER}-01"}
