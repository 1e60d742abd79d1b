"""`turnwise proxy --workers N`: start N serving processes behind one port, and replace those that die.

Each worker is a whole proxy with its own writing process; the store is what they share. Each listens on the port with
SO_REUSEPORT, so the kernel distributes connections, and the connections of a worker that died go to the others. The
parent serves no request: it holds the port, passes messages between the workers, and keeps no state that a restart
would lose.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.multiprocess import mark_process_dead

from proxy.features.workers.peers import Awaited, Confirmed, WorkerFailed, WorkerReady, WorkerSetup
from proxy.features.workers.settings import WorkerSettings
from proxy.writer.frames import Link, frame
from turnwise.errors import ChildFailed, SettingsError, TurnwiseError
from turnwise.processes.supervisor import describe_exit
from turnwise.settings import child_environment
from turnwise.telemetry.logs import configure_logging

log = logging.getLogger(__name__)
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Makes prometheus_client keep its values in files of this directory."""
QUICK_SECONDS = 10.0
"""A worker that dies this soon after its start is replaced with a growing delay."""
FIRST_DELAY_SECONDS = 0.2
MAX_DELAY_SECONDS = 30.0
STOP_MARGIN_SECONDS = 10.0
"""Time beyond the drain and the last commits until a worker that does not stop is killed."""


def run(settings: WorkerSettings) -> int:
    """Serve with `settings.workers` processes until SIGTERM or SIGINT; return the exit status.

    Raises:
        SettingsError: this system cannot distribute connections, or the address is taken.
        TurnwiseError: a worker cannot start.
    """
    configure_logging(settings.log_level, settings.log_format)
    if sys.platform != "linux":
        raise SettingsError(f"workers={settings.workers} needs Linux, which distributes connections; use workers=1")
    with tempfile.TemporaryDirectory(prefix="turnwise-metrics-") as directory, contextlib.ExitStack() as held:
        sockets = listening_sockets(settings.host, settings.port)
        for bound in sockets:
            held.enter_context(bound)
        port = sockets[0].getsockname()[1]
        shared = settings.model_copy(update={"port": port}).divided()
        return asyncio.run(_Workers(WorkerSetup(shared, Path(directory)), settings.workers).run())


def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Return sockets that are bound, with SO_REUSEPORT, to each address of a host; they do not listen yet.

    Raises:
        SettingsError: an address cannot be bound.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, number, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, number)
            sockets.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            bound.bind((address[0], port or sockets[0].getsockname()[1], *address[2:]))
            bound.set_inheritable(False)
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise SettingsError(
            f"the proxy cannot listen on {host}:{port}: {error.strerror}; choose another host or port"
        ) from error
    return sockets


@dataclasses.dataclass(slots=True, eq=False)
class _Worker:
    """One serving process."""

    process: asyncio.subprocess.Process
    transport: asyncio.Transport | None = None
    is_ready: bool = False
    error: TurnwiseError | None = None
    """Why it could not start, as it reported."""
    started_at: float = dataclasses.field(default_factory=time.monotonic)

    def send(self, message: object) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.writelines(frame(message))


class _Confirmation(NamedTuple):
    """The confirmation of a change by the workers."""

    sender: _Worker
    missing: set[_Worker]


class _Workers:
    """The workers of one proxy, each kept running by its own task."""

    def __init__(self, setup: WorkerSetup, num_workers: int) -> None:
        self._setup = setup
        self._num_workers = num_workers
        self._running: set[_Worker] = set()
        self._awaited: dict[str, _Confirmation] = {}
        """Changes that some workers have not confirmed yet, by the receipt."""
        self._is_stopping = False
        self._stop = asyncio.Event()

    async def run(self) -> int:
        """Keep all workers running until a signal.

        Raises:
            TurnwiseError: a worker died before it served for the first time.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        stopping = loop.create_task(self._stop.wait())
        keeping = [loop.create_task(self._keep(number)) for number in range(self._num_workers)]
        try:
            done, _ = await asyncio.wait({stopping, *keeping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await self._end_all()
            stopping.cancel()
            await asyncio.gather(stopping, *keeping, return_exceptions=True)
        for task in done - {stopping}:
            task.result()
        return 0

    async def _keep(self, number: int) -> None:
        """Run one worker, and another one whenever it has died."""
        num_quick_deaths, has_served = 0, False
        while not self._is_stopping:
            worker = await self._start(number)
            if self._is_stopping:  # `_end_all` did not see this one
                with contextlib.suppress(ProcessLookupError):
                    worker.process.kill()
            code = await worker.process.wait()
            self._forget(worker)
            if self._is_stopping:
                return
            has_served = has_served or worker.is_ready
            if not has_served:
                raise worker.error or ChildFailed(
                    f"a worker ended with {describe_exit(code)} before it served; its log is above"
                )
            is_quick = time.monotonic() - worker.started_at < QUICK_SECONDS
            num_quick_deaths = num_quick_deaths + 1 if is_quick else 0
            delay = min(FIRST_DELAY_SECONDS * 2**num_quick_deaths, MAX_DELAY_SECONDS)
            log.error(
                "worker %d ended with %s%s; another one is started in %.1f s",
                worker.process.pid,
                describe_exit(code),
                f" ({worker.error})" if worker.error else "",
                delay,
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay):
                    await self._stop.wait()

    async def _start(self, number: int) -> _Worker:
        """Start a worker and send it its setup."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",  # not `-m`: objects must be pickled under the name of their module
                "from proxy.main import serve; from proxy.features.workers.worker import run_worker; run_worker(serve)",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                env=child_environment({METRICS_VARIABLE: str(self._setup.metrics_directory)}),
            )
        worker = _Worker(process)
        self._running.add(worker)
        loop = asyncio.get_running_loop()
        worker.transport, _ = await loop.create_unix_connection(
            lambda: Link(functools.partial(self._take, worker)), sock=ours
        )
        worker.transport.writelines(frame(self._setup._replace(number=number)))
        return worker

    def _take(self, worker: _Worker, message: Any) -> None:
        """Handle a message of a worker: what is not for the parent goes to all other workers."""
        match message:
            case WorkerReady():
                worker.is_ready = True
                log.info("worker %d serves on port %d", worker.process.pid, self._setup.settings.port)
            case WorkerFailed(error):
                worker.error = error
            case Confirmed(receipt):
                self._note_confirmation(receipt, worker)
            case _:
                others = {other for other in self._running - {worker} if other.transport is not None}
                for other in others:
                    other.send(message)
                if isinstance(message, Awaited):
                    # A worker that does not serve yet handles the change before it reads any engine's label.
                    self._awaited[message.receipt] = _Confirmation(
                        worker, {other for other in others if other.is_ready}
                    )
                    self._note_confirmation(message.receipt, worker)

    def _note_confirmation(self, receipt: str, worker: _Worker) -> None:
        """Note that one worker's confirmation is no longer awaited; tell the sender when none is."""
        awaited = self._awaited.get(receipt)
        if awaited is None:
            return
        awaited.missing.discard(worker)
        if not awaited.missing:
            del self._awaited[receipt]
            awaited.sender.send(Confirmed(receipt))

    def _forget(self, worker: _Worker) -> None:
        """Remove a worker that has ended, and its gauges; its counters remain in the sums."""
        self._running.discard(worker)
        for receipt in list(self._awaited):
            self._note_confirmation(receipt, worker)
        mark_process_dead(worker.process.pid, str(self._setup.metrics_directory))  # type: ignore[no-untyped-call]
        if worker.transport is not None:
            worker.transport.close()

    async def _end_all(self) -> None:
        """Let all workers finish their calls; kill those that take too long."""
        self._is_stopping = True
        self._stop.set()
        settings = self._setup.settings
        for number, seconds in (
            (signal.SIGTERM, settings.drain_seconds + settings.commit_timeout_seconds + STOP_MARGIN_SECONDS),
            (signal.SIGKILL, STOP_MARGIN_SECONDS),
        ):
            waiting = [asyncio.ensure_future(worker.process.wait()) for worker in self._running]
            if not waiting:
                return
            for worker in self._running:
                with contextlib.suppress(ProcessLookupError):
                    worker.process.send_signal(number)
            await asyncio.wait(waiting, timeout=seconds)
