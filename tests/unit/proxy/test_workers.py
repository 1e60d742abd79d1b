"""The parent of several workers passes changes on, and says when all workers that serve have applied them."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from support.waiting import WAIT_SECONDS

from proxy.features.workers.parent import _Worker, _Workers
from proxy.features.workers.peers import (
    Announced,
    Awaited,
    Confirmed,
    Peers,
    WorkerReady,
    WorkerSetup,
)
from proxy.features.workers.settings import WorkerSettings
from proxy.writer.frames import Link, frame

KEYS = Announced("keys")
LOADED = Awaited(Announced("weights", ("http://engine", "7")), "receipt")


class Sent(asyncio.Transport):
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def writelines(self, pieces: Any) -> None:
        Link(self.messages.append).data_received(b"".join(pieces))

    def is_closing(self) -> bool:
        return False

    def close(self) -> None: ...


class Ended:
    pid = 1


@pytest.fixture
def workers(tmp_path: Path) -> _Workers:
    parent = _Workers(WorkerSetup(WorkerSettings(), tmp_path), 3)
    for is_ready in (True, True, True, False):
        worker = _Worker(Ended(), Sent())
        parent._running.add(worker)
        if is_ready:
            parent._take(worker, WorkerReady())
    return parent


def ready(workers: _Workers) -> list[_Worker]:
    return [worker for worker in workers._running if worker.is_ready]


def received(worker: _Worker) -> list[Any]:
    return worker.transport.messages


def test_a_change_goes_to_all_other_workers_and_only_some_are_confirmed(workers):
    sender, *_ = ready(workers)
    workers._take(sender, KEYS)
    assert [received(worker) == [KEYS] for worker in workers._running - {sender}] == [True] * 3
    assert received(sender) == []


def test_a_change_is_confirmed_when_each_other_worker_that_serves_has_confirmed_it(workers):
    """A worker that is starting gets it too, and is not awaited."""
    sender, second, third = ready(workers)
    workers._take(sender, LOADED)
    assert [received(worker) for worker in workers._running - {sender}] == [[LOADED]] * 3
    workers._take(second, Confirmed("receipt"))
    assert received(sender) == []
    workers._take(third, Confirmed("receipt"))
    assert received(sender) == [Confirmed("receipt")]


def test_a_worker_that_dies_before_it_confirms_is_not_awaited(workers):
    sender, second, third = ready(workers)
    workers._take(sender, LOADED)
    workers._take(second, Confirmed("receipt"))
    workers._forget(third)
    assert received(sender) == [Confirmed("receipt")]
    workers._forget(second)
    workers._take(sender, LOADED)
    assert received(sender) == [Confirmed("receipt")] * 2, "no other worker serves"


async def test_a_starting_worker_applies_the_changes_since_its_start():
    """Other workers change sessions while it starts; the last change arrives in two parts."""
    applied, is_last = [], asyncio.Event()
    sent = b"".join((*frame(LOADED), *frame(KEYS)))

    async def apply(change: Announced) -> None:
        applied.append(change)
        if change == KEYS:
            is_last.set()

    parent, worker = socket.socketpair()
    with parent, worker:
        parent.sendall(sent[:-5])
        peers = Peers(worker)
        await peers.connect(apply)
        parent.sendall(sent[-5:])
        await asyncio.wait_for(is_last.wait(), WAIT_SECONDS)
        peers.close()
    assert applied == [LOADED.change, KEYS]
