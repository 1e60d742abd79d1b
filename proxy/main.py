"""Run one proxy process until it is told to stop."""

from __future__ import annotations

import gc
import logging
import sys

import uvicorn

from proxy.app import create_app
from proxy.connections import limited_http
from proxy.routes.data_plane import DataPlane
from proxy.routes.edge import Edge
from proxy.settings import ProxySettings
from proxy.writer.process import GC_ALLOCATIONS
from turnwise.telemetry import configure_logging

SWITCH_SECONDS = 0.0003
"""How long a thread that reads the store waits for the interpreter while the event loop runs."""
KEEP_ALIVE_SECONDS = 75
"""Longer than the pools of the usual clients keep an idle connection, so that none sends into one that is closing."""


def run(settings: ProxySettings) -> int:
    """Serve until SIGTERM or SIGINT; return the exit status.

    Raises:
        TurnwiseError: the proxy cannot start.
    """
    _hide_torch()
    configure_logging(settings.log_level, settings.log_format)
    app = create_app(settings)
    edge = Edge(DataPlane(app), app, settings)
    server = uvicorn.Server(
        uvicorn.Config(
            edge,
            host=settings.host,
            port=settings.port,
            loop="uvloop",
            http=limited_http(
                whole_seconds=settings.header_timeout_seconds,
                max_head_bytes=settings.max_header_bytes,
                stall_seconds=settings.client_stall_seconds,
            ),
            ws="none",
            proxy_headers=False,  # the client's address is not used
            access_log=False,
            log_level=settings.log_level,
            log_config=None,
            timeout_graceful_shutdown=settings.drain_seconds,  # type: ignore[arg-type]  # a float works,
            ssl_certfile=settings.tls_certificate,
            ssl_keyfile=settings.tls_key,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=4096,
            lifespan="on",
        )
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    gc.set_threshold(GC_ALLOCATIONS, 20, 100)
    # An expected error becomes one sentence; uvicorn would log its traceback.
    logging.getLogger("uvicorn.error").addFilter(lambda _: not hasattr(app.state, "startup_error"))
    try:
        server.run()
    except SystemExit:
        if hasattr(app.state, "startup_error"):
            raise app.state.startup_error from None
        raise
    finally:
        edge.close()
    return 0 if server.started else 1


def _hide_torch() -> None:
    """Hide torch from transformers, which is used for its tokenizers only.

    Where torch is installed, importing a tokenizer imports it too: 3 s more until the proxy is ready, and 340 MB of
    memory that is never used.
    """
    if "torch" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # what makes an import fail as if it were not there
        logging.getLogger("transformers").addFilter(lambda record: "PyTorch was not found" not in record.getMessage())
