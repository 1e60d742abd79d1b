"""Sessions as OpenTelemetry traces: read by OpenTelemetry's own messages, sent over HTTP, with rewards as scores."""

from __future__ import annotations

import base64
import http.server
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from support.ledger_samples import make_turn
from support.migrated import migrated
from support.servers import serving

from turnwise.commands.cli import main
from turnwise.store import turns
from turnwise.store.database import Database
from turnwise.store.rewards import add_rewards
from turnwise.store.sessions import create_session, end_session
from turnwise.types import Outcome, Reward, Session


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """One session of two turns, the second aborted, with a reward for the session and a revised one for a turn."""
    url = f"sqlite:///{tmp_path}/turnwise.db"
    database = Database(migrated(url))
    first = make_turn("t1", duration_seconds=1.5)
    second = make_turn("t2", first, outcome=Outcome.ABORTED, reason="disconnected")
    rewards = [
        Reward(session_id="s", value=0.5),
        Reward(session_id="", turn_id="t1", value=9.0, name="style"),
        Reward(session_id="", turn_id="t1", value=1.0, name="style", source="a person"),
    ]
    with database.write() as conn:
        create_session(conn, Session(session_id="s", task_id="kim", group_id="g"))
        turns.append_turns(conn, [first, second])
        add_rewards(conn, rewards)
        end_session(conn, "default", "s")
    database.close()
    return url


@pytest.fixture
def collector() -> Iterator[tuple[str, list[tuple[str, dict, dict]]]]:
    """A server that keeps what is posted: path, headers and body."""
    received: list[tuple[str, dict, dict]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            received.append((self.path, dict(self.headers), body))
            self.send_response(401 if self.path == "/refused" else 200)
            self.send_header("content-length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *_: object) -> None:
            pass

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url, received


def export(url: str) -> str:
    result = CliRunner().invoke(main, ["export", "--format", "otlp", "--database", url])
    assert result.exit_code == 0, result.output
    return result.output


def send(url: str, *options: str, status: int = 0, **environment: str) -> str:
    sessions = CliRunner().invoke(main, ["export", "--format", "sessions", "--database", url])
    assert sessions.exit_code == 0, sessions.output
    result = CliRunner().invoke(main, ["send-traces", *options], input=sessions.stdout, env=environment)
    assert result.exit_code == status, result.output
    return result.output


def request_of(line: dict) -> ExportTraceServiceRequest:
    """Return OpenTelemetry's message; its ids are hexadecimal in OTLP's JSON, and base64 in protobuf's."""
    text = json.dumps(line)
    for span in line["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for field in ("traceId", "spanId", "parentSpanId"):
            if field in span:
                text = text.replace(f'"{span[field]}"', f'"{base64.b64encode(bytes.fromhex(span[field])).decode()}"')
    return json_format.Parse(text, ExportTraceServiceRequest())


def test_a_session_is_a_trace_with_a_span_for_each_turn(database_url: str) -> None:
    (line,) = map(json.loads, export(database_url).splitlines())
    session, first, second = request_of(line).resource_spans[0].scope_spans[0].spans
    assert (len(session.trace_id), len(session.span_id), session.parent_span_id) == (16, 8, b"")
    assert {first.trace_id, second.trace_id} == {session.trace_id}
    assert first.parent_span_id == second.parent_span_id == session.span_id != first.span_id
    assert first.end_time_unix_nano - first.start_time_unix_nano == 1_500_000_000
    values = {attribute.key: attribute.value for attribute in first.attributes}
    assert values["gen_ai.usage.input_tokens"].int_value == 2
    assert values["gen_ai.usage.output_tokens"].int_value == 2
    assert values["langfuse.observation.type"].string_value == "generation"
    assert json.loads(values["langfuse.observation.output"].string_value)["content"] == "answer 1"
    assert (first.status.code, second.status.code, second.status.message) == (0, 2, "disconnected")


def test_rewards_are_evaluation_events_and_a_revision_replaces_what_it_revises(database_url: str) -> None:
    (line,) = map(json.loads, export(database_url).splitlines())
    spans = request_of(line).resource_spans[0].scope_spans[0].spans
    found = [
        [{attribute.key: attribute.value for attribute in event.attributes} for event in span.events] for span in spans
    ]
    names = [[event["gen_ai.evaluation.name"].string_value for event in events] for events in found]
    assert names == [["reward"], ["style"], []]
    assert found[0][0]["gen_ai.evaluation.score.value"].double_value == 0.5
    assert found[1][0]["gen_ai.evaluation.score.value"].double_value == 1.0


def test_the_same_sessions_give_the_same_bytes(database_url: str) -> None:
    assert export(database_url) == export(database_url)


def test_traces_are_sent_to_an_otlp_endpoint(database_url: str, collector: tuple[str, list]) -> None:
    url, received = collector
    send(database_url, "--to", f"{url}/v1/traces", OTEL_EXPORTER_OTLP_HEADERS="x-key=secret")
    ((path, headers, body),) = received
    assert (path, headers["x-key"], headers["Content-Type"]) == ("/v1/traces", "secret", "application/json")
    assert len(request_of(body).resource_spans[0].scope_spans[0].spans) == 3


def test_langfuse_gets_rewards_as_scores_of_their_span(database_url: str, collector: tuple[str, list]) -> None:
    url, received = collector
    send(database_url, "--langfuse", url, LANGFUSE_KEYS="pk-1:sk-2")
    assert [path for path, _, _ in received] == ["/api/public/otel/v1/traces", *["/api/public/scores"] * 2]
    (_, headers, trace), (_, _, whole), (_, _, style) = received
    assert headers["authorization"] == f"Basic {base64.b64encode(b'pk-1:sk-2').decode()}"
    session, first, _ = trace["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert (whole["traceId"], whole["name"], whole["value"]) == (session["traceId"], "reward", 0.5)
    assert "observationId" not in whole
    assert (style["observationId"], style["value"], style["comment"]) == (first["spanId"], 1.0, "a person")
    assert whole["id"] != style["id"]


def test_a_refusal_names_the_session_and_the_answer(database_url: str, collector: tuple[str, list]) -> None:
    assert "answered 401 to session 's'" in send(database_url, "--to", f"{collector[0]}/refused", status=1)
    assert "LANGFUSE_KEYS" in send(database_url, "--langfuse", collector[0], status=2)
