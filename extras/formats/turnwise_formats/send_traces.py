"""`turnwise send-traces`: sessions to an OTLP endpoint or to Langfuse.

turnwise export --format sessions | turnwise send-traces --to http://127.0.0.1:4318/v1/traces
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TextIO

import click

from turnwise.errors import InvalidRequest, SettingsError
from turnwise.types import Json
from turnwise_formats import trace_endpoint
from turnwise_formats.trace_endpoint import TraceEndpoint


@click.command("send-traces")
@click.argument("sessions", type=click.File(encoding="utf-8"), default="-")
@click.option("--to", metavar="URL", help="OTLP endpoint, …/v1/traces.")
@click.option("--headers", default="", envvar="OTEL_EXPORTER_OTLP_HEADERS", help="For --to: NAME=VALUE,NAME=VALUE.")
@click.option("--langfuse", metavar="URL", help="Langfuse server; it gets rewards as scores too.")
@click.option("--langfuse-keys", default="", envvar="LANGFUSE_KEYS", hidden=True, help="PUBLIC_KEY:SECRET_KEY.")
def send_traces(sessions: TextIO, to: str | None, headers: str, langfuse: str | None, langfuse_keys: str) -> None:
    """Send SESSIONS, which `turnwise export --format sessions` wrote, as traces."""
    count = trace_endpoint.send(_read(sessions), _endpoint(to, headers, langfuse, langfuse_keys))
    click.echo(f"{count} sessions sent", err=True)


def _read(file: TextIO) -> Iterator[Json]:
    for number, line in enumerate(file, 1):
        try:
            session: Json = json.loads(line)
            is_session = {"session_id", "turns", "rewards"} <= session.keys()
        except (ValueError, AttributeError) as error:
            raise InvalidRequest(f"line {number} is not a JSON object: {error}") from error
        if not is_session:
            raise InvalidRequest(f"line {number} is not a session; write it by `turnwise export --format sessions`")
        yield session


def _endpoint(to: str | None, headers: str, langfuse: str | None, langfuse_keys: str) -> TraceEndpoint:
    if to is not None and langfuse is None:
        pairs = [pair.partition("=") for pair in headers.split(",") if pair]
        return TraceEndpoint(traces_url=to, headers={name.strip(): value.strip() for name, _, value in pairs})
    if langfuse is None or to is not None:
        raise SettingsError("name one endpoint: --to for OTLP, or --langfuse")
    if ":" not in langfuse_keys:
        raise SettingsError("--langfuse needs LANGFUSE_KEYS in the environment: PUBLIC_KEY:SECRET_KEY")
    return trace_endpoint.langfuse(langfuse, langfuse_keys)
