"""Traces and scores to an OTLP endpoint or to Langfuse, over HTTP with JSON bodies."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Iterable

import httpx2

from turnwise.errors import ExportFailed
from turnwise.types import Json
from turnwise_formats import otlp

TIMEOUT_SECONDS = 30.0
LANGFUSE_TRACES = "/api/public/otel/v1/traces"
LANGFUSE_SCORES = "/api/public/scores"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceEndpoint:
    """Where traces go."""

    traces_url: str
    scores_url: str | None = None
    """Langfuse takes scores at its own route; None: rewards are only events of the spans."""
    headers: dict[str, str] = dataclasses.field(default_factory=dict)


def langfuse(url: str, keys: str) -> TraceEndpoint:
    """Return a Langfuse server; `keys` are its public and its secret key, `pk-…:sk-…`."""
    token = base64.b64encode(keys.encode()).decode()
    base = url.rstrip("/")
    headers = {"authorization": f"Basic {token}", "x-langfuse-ingestion-version": "4"}
    return TraceEndpoint(traces_url=base + LANGFUSE_TRACES, scores_url=base + LANGFUSE_SCORES, headers=headers)


def send(sessions: Iterable[Json], endpoint: TraceEndpoint) -> int:
    """Send each session's trace, and its scores where the endpoint takes them; return the number of sessions.

    Ids follow from the sessions, so a trace that is sent again replaces itself.

    Raises:
        ExportFailed: the endpoint cannot be reached or refuses a request.
    """
    count = 0
    with httpx2.Client(headers=endpoint.headers, timeout=TIMEOUT_SECONDS) as http:
        for session in sessions:
            for request in otlp.lines(session):
                _post(http, endpoint.traces_url, request, session)
            if endpoint.scores_url is not None:
                for score in otlp.scores(session):
                    _post(http, endpoint.scores_url, score, session)
            count += 1
    return count


def _post(http: httpx2.Client, url: str, body: Json, session: Json) -> None:
    name = session["session_id"]
    try:
        response = http.post(url, json=body)
    except httpx2.HTTPError as error:
        raise ExportFailed(
            f"{url} cannot be reached ({type(error).__name__}: {error}); session {name!r} was not sent"
        ) from error
    if response.is_error:
        raise ExportFailed(f"{url} answered {response.status_code} to session {name!r}: {response.text:.300}")
