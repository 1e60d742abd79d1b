"""Ports for servers that start later: no other process is given one of them in between.

The kernel gives ports of its ephemeral range (from 32768 on Linux) to every socket that asks for any port, and a port
that was free when it was looked up may be another server's a moment later. These ports are below that range, each test
process has its own part of them, and none is returned twice before all others.
"""

from __future__ import annotations

import itertools
import os
import random

from turnwise.processes.ports import is_free

FIRST = 12_000
PORTS_PER_PROCESS = 2_500
MOST_PROCESSES = 8


def own_ports() -> range:
    """Return the part of this test process; pytest-xdist numbers them."""
    number = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % MOST_PROCESSES
    first = FIRST + number * PORTS_PER_PROCESS
    return range(first, first + PORTS_PER_PROCESS)


def _shuffled() -> list[int]:
    """Return the part in another order for each run: two runs on one machine seldom take the same ports."""
    return random.Random(os.getpid()).sample(own_ports(), PORTS_PER_PROCESS)


_ports = itertools.cycle(_shuffled())


def free_port() -> int:
    """Return a port of loopback that nothing listens on, and that no other caller gets."""
    return next(port for port in itertools.islice(_ports, PORTS_PER_PROCESS) if is_free(port))
