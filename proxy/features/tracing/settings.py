"""The settings of the access log and of spans."""

from __future__ import annotations

from pathlib import Path

from turnwise.settings import Settings


class TracingSettings(Settings):
    """Where each request is written."""

    access_log: Path | None = None
    """File for one line of JSON for each request, `-` for stdout; off by default."""
    otlp_endpoint: str | None = None
    """Base URL of an OTLP/HTTP collector, such as http://127.0.0.1:4318, that gets OpenTelemetry spans of each request;
    needs the extra `otel`. By default none are made."""
