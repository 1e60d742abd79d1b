"""Send a prepared reply at its pace until the client disconnects or a fault breaks it off.

A reply is a list of byte strings before it is sent, so pace, pausing and faults are the same for all routes. A reset
aborts the transport, so the peer gets a connection reset instead of an orderly close.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from turnwise_fake_engine.ledger import EngineState, SeenCall
from turnwise_fake_engine.script import Fault, FaultKind

ABORT_KEY = "fake_engine.abort"
"""Key of the function that resets the connection, in the ASGI scope."""


_CUTS = {FaultKind.RESET_STREAM, FaultKind.HANG_STREAM}
"""Faults that apply between two parts."""


class Delivery(Response):
    """An ASGI response that writes its parts one by one."""

    def __init__(
        self,
        parts: list[bytes],
        *,
        call: SeenCall,
        state: EngineState,
        fault: Fault | None,
        streamed: bool,
        pace_seconds: float,
    ) -> None:
        super().__init__()
        self._parts = parts
        self._call = call
        self._state = state
        self._fault = fault
        self._streamed = streamed
        self._pace_seconds = pace_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the last part is sent, the client disconnects, or a fault applies."""
        writer = asyncio.create_task(self._write(send, scope.get(ABORT_KEY)))
        watcher = asyncio.create_task(_until_disconnected(receive))
        try:
            await asyncio.wait({writer, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not writer.done():
                self._call.outcome = "aborted"
        finally:
            for task in (writer, watcher):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(writer, watcher)

    async def _write(self, send: Send, abort: Callable[[], None] | None) -> None:
        kind = self._fault.kind if self._fault else None
        await self._state.running.wait()
        if self._fault and kind is FaultKind.SLOW_FIRST_TOKEN:
            await asyncio.sleep(self._fault.seconds)
        if kind is FaultKind.HANG:
            await asyncio.Event().wait()
        if kind is FaultKind.RESET:
            self._reset(abort)
            return
        await send(self._start())
        self._call.versions = [self._state.weight_version]
        for index, part in enumerate(self._paced_parts()):
            if self._fault and kind in _CUTS and index >= self._fault.after_chunks:
                await self._break(abort)
                return
            if self._pace_seconds:
                await asyncio.sleep(self._pace_seconds)
                await self._state.running.wait()
            label = self._state.weight_version
            # The first part of a stream has no token.
            begins = self._streamed and index <= 1
            self._call.versions = [label if begins else self._call.versions[0], label]
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
        self._call.outcome = "faulted" if self._fault else "finished"

    def _paced_parts(self) -> list[bytes]:
        """Return the parts to write; without a pace and without a fault, all data is one part."""
        if self._fault is None or self._fault.kind not in _CUTS:
            return self._parts if self._pace_seconds else [b"".join(self._parts)]
        if self._streamed:
            return self._parts
        whole, num_cuts = b"".join(self._parts), self._fault.after_chunks + 1
        ends = [len(whole) * cut // num_cuts for cut in range(num_cuts + 1)]
        return [whole[start:end] for start, end in itertools.pairwise(ends)]

    def _start(self) -> dict[str, object]:
        kind = b"text/event-stream; charset=utf-8" if self._streamed else b"application/json"
        headers = [(b"content-type", kind)]
        if not self._streamed:
            headers.append((b"content-length", str(sum(map(len, self._parts))).encode()))
        return {"type": "http.response.start", "status": 200, "headers": headers}

    async def _break(self, abort: Callable[[], None] | None) -> None:
        # The written data must reach the client before the connection closes.
        await asyncio.sleep(0.02)
        if self._fault and self._fault.kind is FaultKind.HANG_STREAM:
            await asyncio.Event().wait()
        self._reset(abort)

    def _reset(self, abort: Callable[[], None] | None) -> None:
        self._call.outcome = "faulted"
        if abort is not None:
            abort()


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
