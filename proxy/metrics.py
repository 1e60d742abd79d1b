"""The proxy's metrics. They count every dropped, rejected, retried and untrainable item.

`turns_of`, `turns_by_role_of`, `tokens_of`, `breaks_of` and `call_seconds_of` cache the labelled metrics that every
call updates. The workers of one proxy keep their values in files of one directory, so any of them can answer with the
sums, and the counts of a worker that died remain.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

LIVE_SUM: Final = "livesum"
"""Of a gauge of several workers: the sum over those that run."""
NEWEST: Final = "mostrecent"
"""Of a gauge that all workers agree on: the value that was set last."""
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one application; each application has its own registry."""

    def __init__(self, directory: Path | None = None) -> None:
        """Create all metrics.

        Args:
            directory: where all workers of the proxy keep their values; None in a proxy of one process.
        """
        self.registry = CollectorRegistry()
        self._directory = directory
        self._computed: list[tuple[Gauge, Callable[[], float]]] = []
        self._add_calls(self.registry)
        self._add_refusals(self.registry)
        self._add_store(self.registry)
        self._add_engines(self.registry)
        self._add_process(self.registry)

    def compute(self, gauge: Gauge, function: Callable[[], float]) -> None:
        """Export the value of a function as a gauge."""
        if self._directory is None:
            gauge.set_function(function)
        else:
            self._computed.append((gauge, function))

    def refresh(self) -> None:
        """Store the values of this worker's computed gauges, for whichever worker is asked."""
        for gauge, function in self._computed:
            gauge.set(function())

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format; those of several workers are summed."""
        if self._directory is None:
            return generate_latest(self.registry)
        self.refresh()
        summed = CollectorRegistry()
        MultiProcessCollector(summed, str(self._directory))  # type: ignore[no-untyped-call]
        summed.register(_WorkerProcesses(self._directory))
        PlatformCollector(registry=summed)
        return generate_latest(summed)

    def _add_calls(self, r: CollectorRegistry) -> None:
        """Add the metrics of calls, from the request to its outcome."""
        self.turns = Counter("turnwise_turns", "Calls by outcome and reason", ["outcome", "reason"], registry=r)
        self.turns_of = functools.cache(self.turns.labels)
        self.turns_by_role = Counter(
            "turnwise_turns_by_role", "Stored completions by the role of their chain", ["role"], registry=r
        )
        self.turns_by_role_of = functools.cache(self.turns_by_role.labels)
        self.tokens = Counter("turnwise_tokens", "Tokens captured", ["kind"], registry=r)
        self.tokens_of = functools.cache(self.tokens.labels)
        self.call_seconds = Histogram(
            "turnwise_call_seconds",
            "Duration of a call, request to last byte",
            ["mode"],
            buckets=SECONDS,
            registry=r,
        )
        self.call_seconds_of = functools.cache(self.call_seconds.labels)
        self.ttft_seconds = Histogram(
            "turnwise_ttft_seconds", "Time to the first token of a stream", buckets=SECONDS, registry=r
        )
        self.in_flight = Gauge(
            "turnwise_calls_in_flight",
            "Calls that wait for an engine or run on one",
            registry=r,
            multiprocess_mode=LIVE_SUM,
        )
        self.queued_calls = Gauge(
            "turnwise_queued_calls", "Calls that wait in the queue of a limit", registry=r, multiprocess_mode=LIVE_SUM
        )
        self.breaks = Counter(
            "turnwise_chain_breaks", "Calls with a history that started a new chain", ["reason"], registry=r
        )
        self.breaks_of = functools.cache(self.breaks.labels)

    def _add_refusals(self, r: CollectorRegistry) -> None:
        """Add the metrics of what was refused, repeated, handed over or removed."""
        self.limited = Counter("turnwise_limited", "Calls answered 429 by the limit reached", ["limit"], registry=r)
        self.refused = Counter(
            "turnwise_refused", "Requests that the proxy answered with its own error", ["code"], registry=r
        )
        self.handed_over = Counter(
            "turnwise_handed_over", "Connections handed to the worker of the session that they name", registry=r
        )
        self.retries = Counter("turnwise_retries", "Retried operations", ["what"], registry=r)
        self.coalesced = Counter("turnwise_coalesced", "Retried calls answered without the engine", registry=r)
        self.dropped_tools = Counter(
            "turnwise_dropped_tools",
            "Removed tools that only a hosted service can run",
            ["tool"],
            registry=r,
        )
        self.dropped_fields = Counter(
            "turnwise_dropped_fields",
            "Removed request fields that control the engine itself",
            ["field"],
            registry=r,
        )
        self.unreadable_routing = Counter(
            "turnwise_unreadable_routing",
            "Turns that are stored without the experts that the engine returned, by what is wrong with these",
            ["reason"],
            registry=r,
        )

    def _add_store(self, r: CollectorRegistry) -> None:
        """Add the metrics of the store: sessions, rewards, commits, groups and updates."""
        self.sessions = Counter(
            "turnwise_sessions", "Sessions by the event that started or ended them", ["event"], registry=r
        )
        self.rewards = Counter("turnwise_rewards", "Rewards written", ["target"], registry=r)
        self.commit_seconds = Histogram(
            "turnwise_commit_seconds",
            "Time that a turn waits for its commit, including queueing",
            buckets=SECONDS,
            registry=r,
        )
        self.commit_batch = Histogram(
            "turnwise_commit_batch_turns",
            "Turns per transaction",
            buckets=(1, 2, 4, 8, 16, 32, 64, 128),
            registry=r,
        )
        self.writer_queue = Gauge(
            "turnwise_writer_queue", "Jobs that wait for their commit", registry=r, multiprocess_mode=LIVE_SUM
        )
        self.groups = Gauge(
            "turnwise_groups",
            "Groups that are open, ready or claimed, by state, at most 10,000 of each; read from the store",
            ["status"],
            registry=r,
            multiprocess_mode=NEWEST,
        )
        self.trainers = Gauge(
            "turnwise_trainers",
            "Trainers by state; `blocked`, `died` and `silent` ones need attention; read from the store",
            ["state"],
            registry=r,
            multiprocess_mode=NEWEST,
        )
        self.last_update = Gauge(
            "turnwise_last_update",
            "The trainer's last update, by its number",
            registry=r,
            multiprocess_mode=NEWEST,
        )
        self.last_update_timestamp = Gauge(
            "turnwise_last_update_timestamp_seconds",
            "When the trainer's last update was committed",
            registry=r,
            multiprocess_mode=NEWEST,
        )
        self.last_update_reward = Gauge(
            "turnwise_last_update_reward_mean",
            "Mean session reward in the trainer's last update",
            registry=r,
            multiprocess_mode=NEWEST,
        )

    def _add_engines(self, r: CollectorRegistry) -> None:
        """Add the metrics of engines and of the versions that they serve."""
        self.engine_up = Gauge(
            "turnwise_engine_up",
            "1 while calls are routed to the engine",
            ["engine"],
            registry=r,
            multiprocess_mode="livemin",
        )
        self.engine_calls = Gauge(
            "turnwise_engine_calls", "Running calls of an engine", ["engine"], registry=r, multiprocess_mode=LIVE_SUM
        )
        self.engine_seconds = Histogram(
            "turnwise_engine_head_seconds",
            "Time from a call's request to the head of the engine's answer",
            ["engine"],
            buckets=SECONDS,
            registry=r,
        )
        self.policy_version = Gauge(
            "turnwise_policy_version", "Served policy version", registry=r, multiprocess_mode=NEWEST
        )
        self.named_policy_version = Gauge(
            "turnwise_named_policy_version",
            "Served version of each named policy, of the first 100; 0 before its first one",
            ["tenant", "policy"],
            registry=r,
            multiprocess_mode=NEWEST,
        )
        self.reloads = Counter("turnwise_reloads", "Weight reloads by result", ["result"], registry=r)
        self.adapter_loads = Counter(
            "turnwise_adapter_loads", "Adapters that an engine loaded at a call that waited for it", registry=r
        )
        self.weight_transfers = Counter(
            "turnwise_weight_transfers",
            "Transfers of weights from a trainer's memory by result",
            ["result"],
            registry=r,
        )
        self.reload_seconds = Histogram(
            "turnwise_reload_pause_seconds", "Time that a reload paused the engines", buckets=SECONDS, registry=r
        )
        self.canary_calls = Counter("turnwise_canary_calls", "Calls during a canary by arm", ["arm"], registry=r)
        self.canaries = Counter("turnwise_canaries", "Canaries by result", ["result"], registry=r)

    def _add_process(self, r: CollectorRegistry) -> None:
        """Add the metrics of the proxy's own process."""
        self.event_listeners = Gauge(
            "turnwise_event_listeners", "Clients of `GET /v1/events`", registry=r, multiprocess_mode=LIVE_SUM
        )
        self.lost_events = Counter(
            "turnwise_lost_events", "Times that a slow client of `GET /v1/events` lost events", registry=r
        )
        self.lost_access_log_lines = Counter(
            "turnwise_lost_access_log_lines",
            "Lines of the access log that could not be written, or that its reader was too slow for",
            registry=r,
        )
        self.lost_log_lines = Counter(
            "turnwise_lost_log_lines",
            "Lines of the log on stderr that could not be written, or that its reader was too slow for",
            registry=r,
        )
        self.lost_spans = Counter(
            "turnwise_lost_spans",
            "OpenTelemetry spans that the collector did not take, or was too slow for",
            registry=r,
        )
        self.lost_activity = Counter(
            "turnwise_lost_engine_activity_minutes",
            "Minutes of engines that are missing in the curve of their idle share, because the store did not answer",
            registry=r,
        )
        self.background_errors = Counter(
            "turnwise_background_errors", "Failures of background tasks, which clients do not see", ["task"], registry=r
        )
        ProcessCollector(registry=r)
        PlatformCollector(registry=r)
        GCCollector(registry=r)


class _WorkerProcesses:
    """The metrics of each worker's own process, by its process id."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with a sample for each worker that runs."""
        pids = sorted(path.stem.rpartition("_")[2] for path in self._directory.glob(f"gauge_{LIVE_SUM}_*.db"))
        found: dict[str, Metric] = {}
        for pid in pids:
            for metric in ProcessCollector(pid=functools.partial(int, pid), registry=None).collect():
                merged = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    merged.add_sample(sample.name, {**sample.labels, "pid": pid}, sample.value)
        yield from found.values()
