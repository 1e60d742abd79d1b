"""Starts and stops one proxy process: sockets, signals, open files."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from proxy import features
from proxy.app import create_app
from proxy.http.connections import LimitedHttp
from proxy.routes.data_plane import data_plane
from proxy.routes.edge import Edge
from proxy.services import Process, running_services
from proxy.settings import ProxySettings
from proxy.writer.process import GC_ALLOCATIONS
from turnwise.telemetry.logs import configure_logging

log = logging.getLogger(__name__)
SWITCH_SECONDS = 0.0003
"""How long a thread that reads the store waits for the interpreter while the event loop runs."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of the usual clients keep an idle connection, so that none sends into one that is closing."""
FILES_PER_CALL = 2
"""Open files of a call: the client's connection and the engine's."""
OTHER_FILES = 100
"""Open files of an idle process: the database, its children, the libraries."""


def allow_open_files(num_calls: int) -> None:
    """Raise this process's limit of open files as far as the system allows; log a warning if that is not enough."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS refuses its own "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = FILES_PER_CALL * num_calls + OTHER_FILES
    if resource.RLIM_INFINITY != allowed < needed:
        log.warning(
            "this process may open %d files, and %d concurrent calls need %d: raise the hard limit (`ulimit -Hn`, "
            "LimitNOFILE of systemd), or lower max_concurrent_calls",
            allowed,
            num_calls,
            needed,
        )


class _Server(uvicorn.Server):
    """uvicorn's server around the services, which start before it listens and are closed after its last reply."""

    def __init__(self, settings: ProxySettings, process: Process) -> None:
        super().__init__(
            uvicorn.Config(
                "",  # `serve` makes the app
                host=settings.host,
                port=settings.port,
                loop="uvloop",
                ws="none",
                proxy_headers=False,  # the client's address is not used
                access_log=False,
                log_level=settings.log_level,
                log_config=None,
                timeout_graceful_shutdown=settings.drain_seconds,  # type: ignore[arg-type]  # a float works
                ssl_certfile=settings.tls_certificate,
                ssl_keyfile=settings.tls_key,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                backlog=4096,
                lifespan="off",
            )
        )
        self._settings = settings
        self._process = process
        self._log_handler = configure_logging(settings.log_level, settings.log_format)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the services, serve until a signal, and close the services.

        Raises:
            TurnwiseError: the services cannot start.
        """
        settings = self._settings
        allow_open_files(settings.max_concurrent_calls)
        with self.capture_signals():
            async with running_services(settings, features.served(), self._process) as services:
                metrics = services.metrics
                if self._log_handler is not None:
                    self._log_handler.count_lost = metrics.lost_log_lines.inc
                edge = Edge(data_plane(create_app(services, features.ROUTES), services), services)
                self.config.app = edge
                self.config.http = functools.partial(  # type: ignore[assignment]  # uvicorn only calls it
                    LimitedHttp,
                    settings,
                    lambda code: metrics.refused.labels(code).inc(),
                    edge.log_head,
                    self._process.hand_over,
                )
                try:
                    await super().serve(sockets)
                finally:
                    await asyncio.to_thread(edge.close)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._process.started(self._make_protocol)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._process.stopping()
        await super().shutdown(sockets)

    def _make_protocol(self, first_data: bytes) -> LimitedHttp:
        """Return the protocol of a connection that another process has accepted, and read so far."""
        make: Callable[..., LimitedHttp] = self.config.http_protocol_class  # type: ignore[assignment]
        of_uvicorn = {"config": self.config, "server_state": self.server_state, "app_state": self.lifespan.state}
        return make(first_data=first_data, **of_uvicorn)

    def handle_exit(self, sig: int, _: FrameType | None) -> None:
        """Stop, unless it is for another process to say so.

        uvicorn would raise the signal again at the end, which ends the process before its last log lines are written.
        """
        if self._process.stops_at_interrupt or sig != signal.SIGINT:
            self.force_exit = self.should_exit and sig == signal.SIGINT
            self.should_exit = True


def serve(settings: ProxySettings, process: Process | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Raises:
        TurnwiseError: the proxy cannot start.
    """
    process = process or Process()
    _hide_torch()
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # modules are never garbage
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)
    # uvicorn loads the files too, and would end with a traceback if they are wrong.
    settings.load_certificate(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "tls_certificate", "tls_key")
    server = _Server(settings, process)
    server.run(process.sockets(settings))
    return 0 if server.started else 1


def _hide_torch() -> None:
    """Hide torch from transformers, which is used for its tokenizers only.

    Where torch is installed, importing a tokenizer imports it too: 3 s more until the proxy is ready, and 340 MB of
    memory that is never used.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # what makes an import fail as if it were not there
        logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())
