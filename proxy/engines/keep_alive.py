"""TCP keep-alive on connections to engines, so that a vanished host is noticed."""

from __future__ import annotations

import asyncio
import os
import socket

KEEP_ALIVE_SECONDS = 10
"""Silence on a connection after which TCP sends keep-alive probes."""
PROBE_SECONDS, NUM_PROBES = 5, 3
"""Interval of the probes, and how many may stay unanswered: a vanished host is noticed after 25 s."""
UNACKNOWLEDGED_SECONDS = 25
"""How long sent data may stay unacknowledged before the connection is closed."""

KEEP_ALIVE_OPTIONS = {
    "TCP_KEEPIDLE": KEEP_ALIVE_SECONDS,
    "TCP_KEEPINTVL": PROBE_SECONDS,
    "TCP_KEEPCNT": NUM_PROBES,
    "TCP_USER_TIMEOUT": UNACKNOWLEDGED_SECONDS * 1000,
}


def set_keep_alive(transport: asyncio.BaseTransport) -> None:
    """Set TCP keep-alive and a limit for unacknowledged data, so that a vanished host is noticed."""
    given = transport.get_extra_info("socket")
    if given is None or given.family not in (socket.AF_INET, socket.AF_INET6):
        return
    # uvloop's object for a socket has no setsockopt; options set through a duplicate apply to the same connection.
    with socket.socket(fileno=os.dup(given.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEP_ALIVE_OPTIONS.items():
            if hasattr(socket, name):  # Linux has all of them
                same.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
