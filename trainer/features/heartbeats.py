"""Whether each process of a trainer on several hosts is still heard: a network that drops everything closes nothing.

Each process counts up a number in torchrun's store, and reads those of all others. It ends, naming the host, when one
number stands still for `SILENT_SECONDS`, or when the store itself does not answer: a collective operation that waits
for the lost process cannot be interrupted. Only the own clock is used. What was claimed is trained after a restart.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Protocol

import torch.distributed as dist

log = logging.getLogger(__name__)
SILENT_SECONDS = 60.0
BEAT_SECONDS = 2.0
ANSWER_SECONDS = 10.0


class Store(Protocol):
    """What is used of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...


class Heartbeats:
    """Those of all processes, as this one has heard them."""

    def __init__(self, rank: int, size: int, store_host: str) -> None:
        self._rank, self._size, self._store_host = rank, size, store_host
        now = time.monotonic()
        self._answered_at = now
        self._heard = {other: (0, now) for other in range(size) if other != rank}
        """The last number of each other process, and when it changed."""
        self._hosts: dict[int, str] = {}

    def beat(self, store: Store, host: str) -> None:
        """Count up, and read what the others have counted."""
        store.set(f"turnwise/host/{self._rank}", host)
        store.add(f"turnwise/beat/{self._rank}", 1)
        for other, (last, _) in self._heard.items():
            number = store.add(f"turnwise/beat/{other}", 0)
            if number != last:
                self._heard[other] = number, time.monotonic()
                self._hosts[other] = store.get(f"turnwise/host/{other}").decode()
        self._answered_at = time.monotonic()

    def problem(self, now: float) -> str | None:
        """Return which process is not heard any more; None if all are."""
        silent = [other for other, (_, at) in self._heard.items() if now - at > SILENT_SECONDS]
        if now - self._answered_at > SILENT_SECONDS:
            return (
                f"torchrun's store on {self._store_host!r} has not answered {socket.gethostname()!r} for "
                f"{SILENT_SECONDS:g} s: check that this host runs and the network to it, then start the trainer again"
            )
        if silent:
            named = ", ".join(f"{other} on {self._hosts.get(other, 'an unknown host')!r}" for other in silent)
            return (
                f"process {named} of the trainer has not been heard on {socket.gethostname()!r} for "
                f"{SILENT_SECONDS:g} s: check that the host runs and the network to it, then start the trainer again"
            )
        return None


def watch(environment: Mapping[str, str], end: Callable[[int], object] = os._exit) -> None:
    """Watch the other processes from two threads, if they are on several hosts.

    Args:
        environment: torchrun's variables.
        end: Ends this process at once.
    """
    if environment.get("WORLD_SIZE") == environment.get("LOCAL_WORLD_SIZE"):
        return  # torchrun itself sees when a process of its own host ends
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    beats = Heartbeats(int(environment["RANK"]), int(environment["WORLD_SIZE"]), address)

    def keep_beating() -> None:
        store: Store | None = None
        while True:
            try:
                store = store or dist.TCPStore(  # type: ignore[attr-defined]  # torch exports it by its name alone
                    address, port, timeout=timedelta(seconds=ANSWER_SECONDS), wait_for_workers=False
                )
                beats.beat(store, socket.gethostname())
            except RuntimeError as error:  # all errors of torch's stores; `problem` says how long it may last
                log.debug("no heartbeat: %s", error)
                store = None
            time.sleep(BEAT_SECONDS)

    def look() -> None:
        while (problem := beats.problem(time.monotonic())) is None:
            time.sleep(BEAT_SECONDS)
        log.error("%s", problem)
        logging.shutdown()
        end(1)

    for work in (keep_beating, look):
        threading.Thread(target=work, name=f"heartbeats-{work.__name__}", daemon=True).start()
