"""Calls made again from a recording, at the pace at which they were made or a multiple of it.

A call is sent once the call that it continues has its answer, and not before its time. The recorded messages are sent
as they are, so the load is that of the recording even where the model answers differently.
"""

from __future__ import annotations

import asyncio
import dataclasses
import statistics
import time
from collections.abc import Sequence

import httpx2

from turnwise.types import Json

TIMEOUT_SECONDS = 600.0
CONNECTIONS = 1000


@dataclasses.dataclass(slots=True)
class ReplayReport:
    """What became of the calls of a recording."""

    calls: int = 0
    failures: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of failed calls by status or by the name of the connection's error."""
    seconds: float = 0.0
    latencies: list[float] = dataclasses.field(default_factory=list)
    """Seconds of each call that was answered with status 200."""
    delays: list[float] = dataclasses.field(default_factory=list)
    """Seconds between the time at which each call was due and the time at which it was sent; none at speed 0."""

    def as_json(self) -> Json:
        """Return the figures of the report."""
        latencies, delays = _percentiles(self.latencies), _percentiles(self.delays)
        return {
            "calls": self.calls,
            "failed": sum(self.failures.values()),
            "failures": self.failures,
            "seconds": round(self.seconds, 3),
            "p50_seconds": round(latencies[49], 4) if latencies else None,
            "p99_seconds": round(latencies[98], 4) if latencies else None,
            "p99_delay_seconds": round(delays[98], 4) if delays else None,
        }


def offsets(calls: Sequence[Json], speed: float) -> list[float]:
    """Return when each call is due, in seconds after the first one; 0 for all at speed 0."""
    if speed == 0:
        return [0.0] * len(calls)
    first = min((call["started_at"] for call in calls), default=0.0)
    return [(call["started_at"] - first) / speed for call in calls]


async def replay(
    calls: Sequence[Json], base_url: str, *, api_key: str, speed: float, model: str | None
) -> ReplayReport:
    """Send recorded calls to an OpenAI-compatible endpoint.

    Args:
        calls: Lines of a recording.
        base_url: The endpoint, with its `/v1`.
        api_key: Sent as the bearer key.
        speed: How many times faster than recorded; 0 sends each call as soon as the one before it is answered.
        model: Model to ask for instead of the recorded one.
    """
    report = ReplayReport(calls=len(calls))
    answered = {call["turn_id"]: asyncio.Event() for call in calls}
    limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    headers = {"authorization": f"Bearer {api_key}"}
    began = time.perf_counter()
    async with httpx2.AsyncClient(base_url=base_url, headers=headers, timeout=TIMEOUT_SECONDS, limits=limits) as client:

        async def send(call: Json, offset: float) -> None:
            try:
                if (parent := answered.get(call["parent_turn_id"] or "")) is not None:
                    await parent.wait()
                if speed > 0:
                    due = began + offset
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    report.delays.append(time.perf_counter() - due)
                await _send(client, call["body"] | ({"model": model} if model else {}), report)
            finally:
                answered[call["turn_id"]].set()

        await asyncio.gather(*map(send, calls, offsets(calls, speed)))
    report.seconds = time.perf_counter() - began
    return report


def _percentiles(values: list[float]) -> list[float]:
    """Return the 99 percentiles; empty without a value."""
    return statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99


async def _send(client: httpx2.AsyncClient, body: Json, report: ReplayReport) -> None:
    started = time.perf_counter()
    try:
        response = await client.post("/chat/completions", json=body)
    except httpx2.HTTPError as error:
        problem: str | None = type(error).__name__
    else:
        problem = None if response.status_code == 200 else str(response.status_code)
    if problem is None:
        report.latencies.append(time.perf_counter() - started)
    else:
        report.failures[problem] = report.failures.get(problem, 0) + 1
