"""Scores reach the ledger from a server with the two routes of Langfuse that are read, as its API defines them."""

from __future__ import annotations

import base64
import contextlib
import http.server
import json
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import httpx2
from support.proxies import running_proxy
from support.servers import serving
from turnwise_fake_engine import running_fake_engine
from turnwise_formats.langfuse_scores import Langfuse, pass_on
from turnwise_formats.otlp import span_id_of, trace_id_of

from turnwise.client import Client
from turnwise.types import Json

SESSION = {"tenant": "default", "session_id": "c"}
TRACE = trace_id_of(SESSION)


@contextlib.contextmanager
def served(scores: list[Json]) -> Iterator[str]:
    """Serve scores, one a page, and the trace of `SESSION`."""

    class Routes(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            route = urllib.parse.urlsplit(self.path)
            asked = dict(urllib.parse.parse_qsl(route.query))
            has_keys = self.headers["authorization"] == f"Basic {base64.b64encode(b'pk-1:sk-1').decode()}"
            status, found = (200, self._found(route.path, asked)) if has_keys else (401, None)
            body = json.dumps(found).encode()
            self.send_response(404 if has_keys and found is None else status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def _found(self, path: str, asked: dict[str, str]) -> Json | None:
            if path == f"/api/public/traces/{TRACE}":
                return {"id": TRACE, "metadata": {**SESSION, "reward": None}}
            if path != "/api/public/v3/scores" or asked["fields"] != "subject" or int(asked["limit"]) > 100:
                return None
            listed = [score for score in scores if score["source"] == asked["source"]]
            at = int(asked.get("cursor", 0))
            more = {"cursor": str(at + 1)} if at + 1 < len(listed) else {}
            return {"data": listed[at : at + 1], "meta": {"limit": 1} | more}

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Routes)) as url:
        yield url


def score(data_type: str, value: object, name: str = "quality", source: str = "ANNOTATION", **subject: str) -> Json:
    about = subject or {"kind": "trace", "id": TRACE}
    return {
        "id": f"{data_type}-{name}",
        "name": name,
        "source": source,
        "dataType": data_type,
        "value": value,
        "subject": about,
    }


def test_scores_of_annotators_are_posted_once_and_revised(tmp_path: Path) -> None:
    with (
        running_fake_engine() as engine,
        running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy,
        Client(proxy.url) as client,
    ):
        body = {"model": "fake", "messages": [{"role": "user", "content": "Where is Kim?"}]}
        answer = httpx2.post(f"{proxy.v1}/chat/completions", json=body, headers={"X-Session-Id": "c"})
        turn_id = answer.raise_for_status().json()["id"]
        turn = {"kind": "observation", "id": span_id_of(SESSION, turn_id), "traceId": TRACE}
        scores = [
            score("NUMERIC", 0.25),
            score("BOOLEAN", True, name="right", **turn),
            score("TEXT", "It is Oslo.", name="note", **turn),
            score("CORRECTION", "In Oslo.", name="output", **turn),
            score("CORRECTION", "", name="empty", **turn),
            score("NUMERIC", 0.5, name="root", kind="observation", id=span_id_of(SESSION, ""), traceId=TRACE),
            score("NUMERIC", 1.0, kind="trace", id="f" * 32),  # of a trace that this proxy did not send
            score("NUMERIC", 1.0, kind="session", id="g"),
            score("NUMERIC", 0.0, name="judge", source="EVAL"),
        ]
        with served(scores) as url:
            langfuse = Langfuse(url, "pk-1:sk-1")
            assert pass_on(client, langfuse) == {"posted": 5, "withdrawn": 0, "without_turn": 1}
            scores[0]["value"] = 0.75
            assert pass_on(client, langfuse) == {"posted": 1, "withdrawn": 0, "without_turn": 1}
            assert pass_on(client, langfuse) == {"posted": 0, "withdrawn": 0, "without_turn": 1}
            assert pass_on(client, langfuse, "EVAL") == {"posted": 1, "withdrawn": 0, "without_turn": 0}
        found = {(each["turn_id"], each["kind"], each["name"]): each["value"] for each in client.feedback_of("c")}
        assert found == {
            (None, "float", "quality"): 0.75,
            (turn_id, "boolean", "right"): True,
            (turn_id, "comment", "note"): "It is Oslo.",
            (turn_id, "demonstration", "output"): "In Oslo.",
            (None, "float", "root"): 0.5,
            (None, "float", "judge"): 0.0,
        }
        assert {each["source"] for each in client.feedback_of("c")} == {"langfuse", "langfuse EVAL"}


def test_a_score_that_was_deleted_is_taken_back_while_its_trace_is_there(tmp_path: Path) -> None:
    with (
        running_fake_engine() as engine,
        running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy,
        Client(proxy.url) as client,
    ):
        body = {"model": "fake", "messages": [{"role": "user", "content": "Where is Kim?"}]}
        for name in ("c", "without-trace"):
            httpx2.post(f"{proxy.v1}/chat/completions", json=body, headers={"X-Session-Id": name}).raise_for_status()
        client.feedback("float", 1.0, session_id="without-trace", source="langfuse")
        client.feedback("boolean", True, session_id="c", source="a person")
        scores = [
            score("NUMERIC", 0.25),
            score("TEXT", "Oslo.", name="note"),
            score("NUMERIC", 0.0, name="judge", source="EVAL"),
        ]
        with served(scores) as url:
            langfuse = Langfuse(url, "pk-1:sk-1")
            pass_on(client, langfuse, "EVAL")
            assert pass_on(client, langfuse) == {"posted": 2, "withdrawn": 0, "without_turn": 0}
            del scores[:2]
            assert pass_on(client, langfuse) == {"posted": 0, "withdrawn": 2, "without_turn": 0}
            assert pass_on(client, langfuse) == {"posted": 0, "withdrawn": 0, "without_turn": 0}
        assert {each["name"] for each in client.feedback_of("c")} == {"feedback", "judge"}
        assert [each["source"] for each in client.feedback_of("without-trace")] == ["langfuse"]
