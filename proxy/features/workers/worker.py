"""One of the processes that serve a port: what it tells the others, which connections it takes, and all metrics."""

from __future__ import annotations

import asyncio
import functools
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from proxy.features.workers.affinity import SessionAffinity
from proxy.features.workers.parent import listening_sockets
from proxy.features.workers.peers import Announced, Peers, WorkerReady, WorkerSetup
from proxy.services import Beside, Process, Services
from proxy.writer.frames import receive
from turnwise.errors import TurnwiseError

if TYPE_CHECKING:
    from prometheus_client import Counter

    from proxy.http.connections import LimitedHttp
    from proxy.metrics import Counted, Metrics
    from proxy.settings import ProxySettings

GAUGES_SECONDS = 1.0
"""How often a worker stores its gauges for the other workers."""


class Workers(Beside):
    """Stores this process's gauges for whichever worker is asked for metrics."""

    counters: ClassVar[Mapping[str, Counted]] = {
        "handed_over": ("turnwise_handed_over", "Connections handed to the worker of the session that they name", ())
    }
    handed_over: Counter

    def __init__(self, services: Services) -> None:
        self._metrics: Metrics = services.metrics

    async def run(self) -> None:
        while True:
            self._metrics.refresh()
            await asyncio.sleep(GAUGES_SECONDS)


class Worker(Process):
    """A process with others beside it."""

    is_shared = True
    stops_at_interrupt = False

    def __init__(self, setup: WorkerSetup, peers: Peers) -> None:
        self._setup = setup
        self._peers = peers
        self._affinity: SessionAffinity | None = None

    def sockets(self, settings: ProxySettings) -> list[socket.socket]:
        return listening_sockets(settings.host, settings.port)

    async def connect(self, services: Services) -> None:
        setup, changes = self._setup, services.changes
        services.metrics.sum_up = functools.partial(summed, setup.metrics_directory)
        if setup.settings.session_affinity:
            handed_over = services.beside[Workers].handed_over
            self._affinity = SessionAffinity(
                setup.metrics_directory, setup.number, setup.settings.workers, count=handed_over.inc
            )
            self.hand_over = self._affinity.hand_over

        async def apply(change: Announced) -> None:
            await changes[change.name](*change.of)

        await self._peers.connect(apply)

    def tell(self, change: str, *of: str) -> None:
        self._peers.announce(Announced(change, of))

    async def confirm(self, seconds: float, change: str, *of: str) -> None:
        await self._peers.confirm(Announced(change, of), seconds)

    def started(self, make_protocol: Callable[[bytes], LimitedHttp]) -> None:
        if self._affinity is not None:
            self._affinity.start(make_protocol)
        self._peers.announce(WorkerReady())

    def stopping(self) -> None:
        if self._affinity is not None:
            self._affinity.close()

    def close(self) -> None:
        self._peers.close()


def run_worker(serve: Callable[[ProxySettings, Process], int]) -> None:
    """Run as a worker: the only argument is the descriptor of the socket to the parent, which it inherits."""
    link = socket.socket(fileno=int(sys.argv[1]))
    setup: WorkerSetup = receive(link)
    peers = Peers(link)
    try:
        sys.exit(serve(setup.settings, Worker(setup, peers)))
    except TurnwiseError as error:
        peers.report_failure(error)
        sys.exit(1)


def summed(directory: Path) -> CollectorRegistry:
    """Return the metrics of all workers, which keep their values in files of a directory.

    Any of them can answer with the sums, and the counts of one that died remain.
    """
    found = CollectorRegistry()
    MultiProcessCollector(found, str(directory))  # type: ignore[no-untyped-call]
    found.register(_WorkerProcesses(directory))
    PlatformCollector(registry=found)
    return found


class _WorkerProcesses:
    """The metrics of each worker's own process, by its process id."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        """Yield each metric with a sample for each worker that runs."""
        pids = sorted(path.stem.rpartition("_")[2] for path in self._directory.glob("gauge_livesum_*.db"))
        found: dict[str, Metric] = {}
        for pid in pids:
            for metric in ProcessCollector(pid=functools.partial(int, pid), registry=None).collect():
                merged = found.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
                for sample in metric.samples:
                    merged.add_sample(sample.name, {**sample.labels, "pid": pid}, sample.value)
        yield from found.values()
