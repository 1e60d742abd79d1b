"""Whether each process of a trainer on several hosts is still heard: a network that drops everything closes nothing.

Each process counts up a number in torchrun's store, and reads those of all others. It ends, naming the host, when one
number stands still for `SILENT_SECONDS`, or when the store itself does not answer: a collective operation that waits
for the lost process cannot be interrupted. What was claimed is trained after a restart.

Threads of their own count and look, so a long step or a long write of a checkpoint is not silence; a process that was
stopped itself cannot say who was silent meanwhile, so only the time is counted in which it looked. One that has done
its work says that it leaves.
"""

from __future__ import annotations

import contextlib
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
LEFT = "(left)"
"""In the place of the host of a process that has done its work."""


class Store(Protocol):
    """What is used of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...

    def set(self, key: str, value: str, /) -> object: ...

    def get(self, key: str, /) -> bytes: ...


class Heartbeats:
    """Those of all processes, as this one has heard them."""

    def __init__(self, rank: int, size: int, store_host: str) -> None:
        self._rank, self._store_host = rank, store_host
        self._looked_at = time.monotonic()
        self._now = 0.0
        """For how long this process has looked."""
        self._answered_at = 0.0
        self._heard = {other: (0, 0.0) for other in range(size) if other != rank}
        """The last number of each other process, and when it changed."""
        self._hosts: dict[int, str] = {}

    def beat(self, store: Store, host: str) -> None:
        """Count up, and read what the others have counted."""
        store.set(f"turnwise/host/{self._rank}", host)
        store.add(f"turnwise/beat/{self._rank}", 1)
        for other, (last, at) in self._heard.items():
            number = store.add(f"turnwise/beat/{other}", 0)
            if number != last or (number and self._now - at > ANSWER_SECONDS):
                found = store.get(f"turnwise/host/{other}").decode()
                if number != last or found == LEFT:
                    self._heard[other] = number, self._now
                self._hosts[other] = found
        self._answered_at = self._now

    def leave(self, store: Store) -> None:
        """Tell the others that no more beats come, since this process has done its work."""
        store.set(f"turnwise/host/{self._rank}", LEFT)

    def problem(self) -> str | None:
        """Look; return which process is not heard any more, None if all are. To be called every `BEAT_SECONDS`."""
        now = time.monotonic()
        self._now += min(now - self._looked_at, 2 * BEAT_SECONDS)
        self._looked_at = now
        silent = [other for other, (_, at) in self._heard.items() if self._now - at > SILENT_SECONDS]
        if self._now - self._answered_at > SILENT_SECONDS:
            return (
                f"torchrun's store on {self._store_host!r} has not answered {socket.gethostname()!r} for "
                f"{SILENT_SECONDS:g} s: check that this host runs and the network to it, then start the "
                "trainer again"
            )
        if silent:
            named = ", ".join(f"{other} on {self._hosts.get(other, 'an unknown host')!r}" for other in silent)
            return (
                f"process {named} of the trainer has not been heard on {socket.gethostname()!r} for "
                f"{SILENT_SECONDS:g} s: check that the host runs and the network to it, then start the "
                "trainer again"
            )
        return None

    def keep_beating(self, connect: Callable[[], Store], is_done: threading.Event) -> None:
        store: Store | None = None
        while not is_done.wait(BEAT_SECONDS):
            try:
                store = store or connect()
                self.beat(store, socket.gethostname())
            except RuntimeError as error:  # all errors of torch's stores; `problem` says how long it may last
                log.debug("no heartbeat: %s", error)
                store = None
        with contextlib.suppress(RuntimeError):
            if store is not None:
                self.leave(store)

    def look(self, end: Callable[[int], object], is_done: threading.Event) -> None:
        while (problem := self.problem()) is None:
            if is_done.wait(BEAT_SECONDS):
                return
        log.error("%s", problem)
        logging.shutdown()
        end(1)


def watch(environment: Mapping[str, str], end: Callable[[int], object] = os._exit) -> Callable[[], None]:
    """Watch the other processes from two threads, if they are on several hosts; return what ends that.

    Args:
        environment: torchrun's variables.
        end: Ends this process at once.
    """
    if environment.get("WORLD_SIZE") == environment.get("LOCAL_WORLD_SIZE"):
        return lambda: None  # torchrun itself sees when a process of its own host ends
    address, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    beats = Heartbeats(int(environment["RANK"]), int(environment["WORLD_SIZE"]), address)
    is_done = threading.Event()

    def connect() -> Store:
        seconds = timedelta(seconds=ANSWER_SECONDS)
        # torch exports it by its name alone
        return dist.TCPStore(address, port, timeout=seconds, wait_for_workers=False)  # type: ignore[attr-defined]

    works = (beats.keep_beating, connect), (beats.look, end)
    threads = [threading.Thread(target=work, args=(of, is_done), daemon=True) for work, of in works]
    for thread in threads:
        thread.start()

    def leave() -> None:
        is_done.set()
        for thread in threads:
            thread.join(2 * ANSWER_SECONDS)

    return leave
