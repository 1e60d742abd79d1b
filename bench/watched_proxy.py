"""`turnwise proxy` with a watch on its event loop: `GET /bench/watch` starts it, `GET /bench/hold` ends it.

`/bench/hold` answers the longest time that the loop was held.

The hold is measured in CPU seconds of the loop's own thread within one round of the loop, so that other processes on
the machine do not count. The watch keeps the loop busy: start it only while no CPU time is measured.
"""

from __future__ import annotations

import asyncio
import sys
import time

import orjson
from starlette.types import Receive, Scope, Send

from proxy import main as proxy_main
from proxy.http.asgi import send_whole
from proxy.routes.edge import Edge
from turnwise.commands.cli import main


class LoopWatch:
    """Measures the longest round of the running event loop."""

    def __init__(self) -> None:
        self.longest = 0.0
        self._at = 0.0
        self._is_on = False

    def start(self) -> None:
        """Measure from now on."""
        self.longest, self._at = 0.0, time.thread_time()
        if not self._is_on:
            self._is_on = True
            asyncio.get_running_loop().call_soon(self._tick)

    def stop(self) -> float:
        """Return the longest round, seconds."""
        self._is_on = False
        return self.longest

    def _tick(self) -> None:
        now = time.thread_time()
        self.longest, self._at = max(self.longest, now - self._at), now
        if self._is_on:
            asyncio.get_running_loop().call_soon(self._tick)


class WatchedEdge(Edge):
    """The proxy's outermost layer with two more routes."""

    _watch = LoopWatch()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope.get("path", "")
        if path == "/bench/watch":
            self._watch.start()
            await send_whole(send, 200, b"{}")
        elif path == "/bench/hold":
            await send_whole(send, 200, orjson.dumps({"seconds": self._watch.stop()}))
        else:
            await super().__call__(scope, receive, send)


if __name__ == "__main__":
    proxy_main.Edge = WatchedEdge  # type: ignore[misc]
    main(["proxy", *sys.argv[1:]])
