"""Takes in the engines that a source names, and lets go of those that it names no more.

An engine that joins gets calls once it has the served version and has proven it: by the probe of that version, and
beside an engine that serves, by the same logprobs of one text. One of another model or with other sampling defaults is
refused by name. An engine that leaves gets no new call, and its connections close when its last call has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import Counter
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from proxy.engines.engine import Engine
from proxy.features.discovery.settings import DiscoverySettings
from proxy.features.discovery.sources import Read, reader
from proxy.features.probes import NUM_PROBED, PROBED_TEXT, token_logprobs
from proxy.services import Beside
from turnwise.errors import EngineUnsuitable, SettingsError
from turnwise.version_directory import Probe

if TYPE_CHECKING:
    from proxy.metrics import Counted
    from proxy.services import Services

log = logging.getLogger(__name__)

WATCH_SECONDS = 2.0
LIMIT_NATS = {"float32": 0.005}
COARSE_LIMIT_NATS = 0.25
"""Largest mean difference of two engines that serve one version; the second where their weights are no float32."""


class Present(Collector):
    """All metrics but the gauges of engines that have left; processes that share files can remove none of them."""

    def __init__(self, metrics: Collector, gone: Collection[str]) -> None:
        self._metrics, self._gone = metrics, gone

    def collect(self) -> Iterator[Metric]:
        for metric in self._metrics.collect():
            if metric.type == "gauge":
                metric.samples = [each for each in metric.samples if each.labels.get("engine") not in self._gone]
            yield metric


class Fleet(Beside):
    """The engines of `engines`."""

    counters: ClassVar[Mapping[str, Counted]] = {
        "changes": ("turnwise_engine_changes", "Engines that joined and left", ["change"]),
        "failures": ("turnwise_engine_source_failures", "Readings of `engines` that named no usable list", []),
    }
    changes: Counter
    failures: Counter

    def __init__(self, services: Services) -> None:
        settings = services.settings
        source = settings.engines if isinstance(settings, DiscoverySettings) else None
        self._services, self._pool = services, services.pool
        self._source = source
        self._read: Read | None = None if source is None else reader(source)
        self._joined: dict[str, Engine] = {}
        self._leaving: set[asyncio.Task[None]] = set()
        self._gone: set[str] = set()
        """Addresses of engines that have left."""
        if source is None:
            return
        if "engine" not in settings.model_fields_set:
            self._gone = {engine.url for engine in self._pool.engines}
            self._pool.engines = []  # nobody named the default address
        self._pool.expects_more = True
        services.engine_checks.append(self._prove)

    async def run(self) -> None:
        if self._read is None:
            return
        metrics, sum_up = self._services.metrics, self._services.metrics.sum_up
        metrics.sum_up = lambda: Present(sum_up(), self._gone)
        try:
            while True:
                await self._look(self._read)
                await asyncio.sleep(WATCH_SECONDS)
        finally:
            for task in self._leaving:
                task.cancel()
            await asyncio.gather(*self._leaving, return_exceptions=True)

    async def _look(self, read: Read) -> None:
        try:
            named = await read()
        except SettingsError as error:
            self.failures.inc()
            problem = f"{error}: {'the last list of engines is kept' if self._joined else 'it has named none yet'}"
            if problem != self._pool.naming_problem:
                log.warning("%s", problem)
            self._pool.naming_problem = problem
            return
        if self._pool.naming_problem is not None:
            log.info("engines=%r is read again and names %d engines", self._source, len(named))
        self._pool.naming_problem = None
        for url in named:
            if url not in self._joined and self._pool.engine_at(url) is None:
                self._gone.discard(url)
                self._joined[url] = self._pool.add(url)
                self.changes.labels("joined").inc()
                log.info("the engine at %s joins", url)
        for url in self._joined.keys() - set(named):
            task = asyncio.create_task(self._let_go(self._joined.pop(url)))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            self.changes.labels("left").inc()
            log.info("the engine at %s leaves: it gets no new call", url)

    async def _let_go(self, engine: Engine) -> None:
        await self._pool.remove(engine)
        if self._pool.engine_at(engine.url) is None:  # it may have come back meanwhile
            self._gone.add(engine.url)

    async def _prove(self, engine: Engine) -> None:
        """Check that an engine that joins serves what the others serve.

        Raises:
            EngineUnsuitable: it is of another model, or samples with other defaults.
            EngineError: its logprobs are not those of the version that its label names.
        """
        if engine not in self._joined.values():
            return
        others = [each for each in self._pool.serving if each is not engine]
        for name in ("model", "defaults"):
            own, theirs = getattr(engine, name), [getattr(each, name) for each in others]
            if theirs and own != theirs[0]:
                raise EngineUnsuitable(
                    f"the engine at {engine.url} has {name} {own!r}, and the one at {others[0].url} {theirs[0]!r}: "
                    "start it as the others are started"
                )
        if self._services.settings.engine_check != "off":
            await self._services.reloader.prove(engine)
            alike = [each for each in others if each.base_lane.version == engine.base_lane.version]
            if alike:
                await self._compare(engine, alike[0])

    async def _compare(self, engine: Engine, other: Engine) -> None:
        text = Probe(await engine.tokenise({"model": engine.model, "messages": PROBED_TEXT}), [])
        positions = text.positions(NUM_PROBED)
        own, theirs = [await token_logprobs(each, each.model, text.token_ids, positions) for each in (engine, other)]
        gap = sum(abs(one - two) for one, two in zip(own, theirs, strict=True)) / len(positions)
        limit = max(LIMIT_NATS.get(each.dtype or "", COARSE_LIMIT_NATS) for each in (engine, other))
        if gap > limit:
            raise EngineUnsuitable(
                f"the engine at {engine.url} and the one at {other.url} both say that they have version "
                f"{engine.base_lane.version}, and differ by {gap:.3g} nats on average (limit {limit:g}): restart it "
                "with the model of the others"
            )
