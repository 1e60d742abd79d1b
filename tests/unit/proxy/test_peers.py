"""A worker's link to its parent."""

from __future__ import annotations

import asyncio
import signal
import socket

import pytest
import uvloop

from proxy.workers.peers import Peers, WorkerReady


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("has_read", [True, False], ids=["read", "unread"])
def test_a_worker_stops_when_its_parent_ends_with_or_without_having_read_its_messages(new_loop, has_read):
    """What a dead process has not read resets the socket instead of ending it."""

    async def run() -> None:
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        parent, link = socket.socketpair()
        with link:
            peers = Peers(link)
            await peers.connect(lambda _: asyncio.sleep(0))
            peers.announce(WorkerReady())
            if has_read:
                parent.recv(1 << 16)
            parent.close()
            await asyncio.wait_for(stopped.wait(), 60)

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(run())
