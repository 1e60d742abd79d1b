"""The proxy's metrics. They count every dropped, rejected, retried and untrainable item."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

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
from prometheus_client.registry import Collector

STORED = {
    "turnwise_groups": (
        "Groups that are open, ready or claimed, by state, at most 10,000 of each; read from the store",
        "status",
    ),
    "turnwise_trainers": (
        "Trainers by state; `blocked`, `died` and `silent` ones need attention; read from the store",
        "state",
    ),
    "turnwise_last_update": ("The trainer's last update, by its number",),
    "turnwise_last_update_timestamp_seconds": ("When the trainer's last update was committed",),
    "turnwise_last_update_reward_mean": ("Mean session reward in the trainer's last update",),
    "turnwise_last_update_trained_share": ("Share of the sampled tokens of the last update's batch with a loss",),
}
"""Gauges of groups, trainers and updates: text and label of each. A tenant gets its own values."""
M = TypeVar("M", Counter, Histogram)
Counted: TypeAlias = tuple[str, str, Sequence[str]]
"""A counter's name, what it counts, and its labels."""
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The metrics of one application; each application has its own registry."""

    def __init__(self) -> None:
        """Create all metrics."""
        self.registry = CollectorRegistry()
        self.sum_up: Callable[[], Collector] = lambda: self.registry
        """Returns what is rendered: the values of all processes of the proxy."""
        self._counters: dict[str, Counter] = {}
        self._computed: list[tuple[Gauge, Callable[[], float]]] = []
        self._sum = functools.partial(Gauge, registry=self.registry, multiprocess_mode="livesum")
        """A gauge that is the sum over the workers that run."""
        self.newest = functools.partial(Gauge, registry=self.registry, multiprocess_mode="mostrecent")
        """A gauge that all workers agree on: the value that was set last."""
        self._add_calls()
        self._add_refusals()
        self._add_store()
        self._add_engines()
        self._add_process()

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """Return the counter of this name, which is made at the first call."""
        if name not in self._counters:
            made = Counter(name, documentation, labels, registry=self.registry)
            self._counters[name] = _with_kept_children(made)
        return self._counters[name]

    def _histogram(
        self, name: str, documentation: str, labels: Sequence[str] = (), buckets: Sequence[float] = SECONDS
    ) -> Histogram:
        return _with_kept_children(Histogram(name, documentation, labels, registry=self.registry, buckets=buckets))

    def compute(self, gauge: Gauge, function: Callable[[], float]) -> None:
        self._computed.append((gauge, function))

    def stop_computing(self, gauge: Gauge) -> None:
        self._computed = [each for each in self._computed if each[0] is not gauge]
        gauge.set(0)

    def refresh(self) -> None:
        """Store the values of this process's computed gauges."""
        for gauge, function in self._computed:
            gauge.set(function())

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        self.refresh()
        return generate_latest(self.sum_up())

    def _add_calls(self) -> None:
        self.turns = self.counter("turnwise_turns", "Calls by outcome and reason", ["outcome", "reason"])
        self.tokens = self.counter("turnwise_tokens", "Tokens captured", ["kind"])
        self.call_seconds = self._histogram(
            "turnwise_call_seconds", "Duration of a call, request to last byte", ["mode"]
        )
        self.ttft_seconds = self._histogram("turnwise_ttft_seconds", "Time to the first token of a stream")
        self.in_flight = self._sum("turnwise_calls_in_flight", "Calls that wait for an engine or run on one")
        self.queued_calls = self._sum("turnwise_queued_calls", "Calls that wait in the queue of a limit")
        self.breaks = self.counter("turnwise_chain_breaks", "Calls with a history that started a new chain", ["reason"])

    def _add_refusals(self) -> None:
        """Add the metrics of what was refused, repeated or removed."""
        self.limited = self.counter("turnwise_limited", "Calls answered 429 by the limit reached", ["limit"])
        self.refused = self.counter(
            "turnwise_refused",
            "Requests that were answered with an error; `engine_STATUS` is the engine's own",
            ["code"],
        )
        self.retries = self.counter("turnwise_retries", "Retried operations", ["what"])
        self.greedy_tokens = self.counter(
            "turnwise_greedy_tokens", "Tokens sampled at temperature 0, which teach nothing"
        )
        self.coalesced = self.counter("turnwise_coalesced", "Retried calls answered without the engine")
        self.dropped_fields = self.counter(
            "turnwise_dropped_fields", "Removed request fields that control the engine itself", ["field"]
        )

    def _add_store(self) -> None:
        """Add the metrics of the store: sessions, rewards, commits, groups and updates."""
        self.sessions = self.counter("turnwise_sessions", "Sessions by the event that started or ended them", ["event"])
        self.rewards = self.counter("turnwise_rewards", "Rewards written", ["target"])
        self.commit_seconds = self._histogram(
            "turnwise_commit_seconds", "Time that a turn waits for its commit, including queueing"
        )
        self.commit_batch = self._histogram(
            "turnwise_commit_batch_turns", "Turns per transaction", buckets=(1, 2, 4, 8, 16, 32, 64, 128)
        )
        self.writer_queue = self._sum("turnwise_writer_queue", "Jobs that wait for their commit")
        self.stored = {name: self.newest(name, text, labels) for name, (text, *labels) in STORED.items()}
        """Those that are read from the store when metrics are asked for."""

    def _add_engines(self) -> None:
        """Add the metrics of engines and of the versions that they serve."""
        self.engine_up = Gauge(
            "turnwise_engine_up",
            "1 while calls are routed to the engine",
            ["engine"],
            multiprocess_mode="livemin",
            registry=self.registry,
        )
        self.engine_calls = self._sum("turnwise_engine_calls", "Running calls of an engine", ["engine"])
        self.engine_seconds = self._histogram(
            "turnwise_engine_head_seconds", "Time from a call's request to the head of the engine's answer", ["engine"]
        )
        self.policy_version = self.newest("turnwise_policy_version", "Served policy version")
        self.reloads = self.counter("turnwise_reloads", "Weight reloads by result", ["result"])
        self.adapter_loads = self.counter(
            "turnwise_adapter_loads", "Adapters that an engine loaded at a call that waited for it"
        )
        self.reload_seconds = self._histogram("turnwise_reload_pause_seconds", "Time that a reload paused the engines")

    def _add_process(self) -> None:
        """Add the metrics of the proxy's own process."""
        self.event_listeners = self._sum("turnwise_event_listeners", "Clients of `GET /v1/events`")
        self.lost_log_lines = self.counter(
            "turnwise_lost_log_lines",
            "Lines of the log on stderr that could not be written, or that its reader was too slow for",
        )
        self.background_errors = self.counter(
            "turnwise_background_errors", "Failures of background tasks, which clients do not see", ["task"]
        )
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)


def _with_kept_children(metric: M) -> M:
    """Let a metric find the children of its labels without a lock; none of them is ever removed."""
    metric.labels = functools.cache(metric.labels)  # type: ignore[method-assign]
    return metric
