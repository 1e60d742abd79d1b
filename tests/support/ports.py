"""Ports for servers that start later: no other test process is given one of them in between.

The kernel gives ports of its ephemeral range (from 32768 on Linux) to every socket that asks for any port, and a port
that was free when it was looked up may be another server's a moment later. These ports are below that range. Each test
process holds a block of them, also beside the processes of another run on this machine, and none is returned twice
before all others. The first port of a block is its lock: the process keeps it bound until it ends, also by a kill.
"""

import atexit
import functools
import itertools
import os
import random
import socket
from collections.abc import Iterator

from turnwise.processes.ports import is_free

FIRST = 12_000
BLOCK = 1_000
NUM_BLOCKS = 20


def _hold(port: int) -> bool:
    """Bind a port until this process ends; return whether it was free."""
    lock = socket.socket()
    try:
        lock.bind(("127.0.0.1", port))
    except OSError:
        lock.close()
        return False
    atexit.register(lock.close)
    return True


@functools.cache
def own_ports() -> range:
    for first in range(FIRST, FIRST + NUM_BLOCKS * BLOCK, BLOCK):
        if _hold(first):
            return range(first + 1, first + BLOCK)
    raise RuntimeError(f"{NUM_BLOCKS} processes hold all ports for tests: end another test run")


@functools.cache
def _ports() -> Iterator[int]:
    """Return the block's ports in another order for each process: servers of an earlier run may still listen."""
    return itertools.cycle(random.Random(os.getpid()).sample(own_ports(), len(own_ports())))


def free_port() -> int:
    return next(port for port in itertools.islice(_ports(), len(own_ports())) if is_free(port))
