"""A relay between two parts that can cut, stall, hold or delay what it forwards, over TCP or a Unix socket."""

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from support.waiting import WAIT_SECONDS

Address = int | Path
"""A port on loopback, or the path of a Unix socket."""

CHUNK_BYTES = 65_536


class Relay:
    def __init__(self, target: Address, listen: Address = 0) -> None:
        self.address = listen
        """Where it listens; with port 0, the port that it got."""
        self._target = target
        self._delay_seconds = 0.0
        self._is_cut = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._server = self._call(self._serve())

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.address}"

    def cut(self) -> None:
        self._call(self._cut())

    def stall(self) -> None:
        self._loop.call_soon_threadsafe(self._flowing.clear)

    def delay(self, seconds: float) -> None:
        self._delay_seconds = seconds

    def restore(self) -> None:
        self._delay_seconds = 0.0
        self._is_cut = False
        self._loop.call_soon_threadsafe(self._flowing.set)

    def close(self) -> None:
        self._call(self._cut())
        self._call(self._shut())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_SECONDS)
        self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(WAIT_SECONDS)

    async def _serve(self) -> asyncio.Server:
        if isinstance(self.address, Path):
            return await asyncio.start_unix_server(self._forward, self.address)
        server = await asyncio.start_server(self._forward, "127.0.0.1", self.address, backlog=512)
        self.address = server.sockets[0].getsockname()[1]
        return server

    async def _shut(self) -> None:
        self._server.close()
        self._flowing.set()
        while others := asyncio.all_tasks() - {asyncio.current_task()}:  # they end because the connections are cut
            await asyncio.gather(*others, return_exceptions=True)

    async def _cut(self) -> None:
        self._is_cut = True
        for writer in self._writers:
            writer.transport.abort()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._flowing.wait()
        if self._is_cut:
            writer.transport.abort()
            return
        try:
            there_reader, there_writer = await self._connect()
        except OSError:
            writer.transport.abort()
            return
        both = {writer, there_writer}
        self._writers |= both
        if self._is_cut:
            await self._cut()
        try:
            # When one direction breaks, both ends must notice: the connections are reset below.
            with contextlib.suppress(OSError):
                await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        finally:
            self._writers -= both
            for each in both:
                each.transport.abort()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if isinstance(self._target, Path):
            return await asyncio.open_unix_connection(self._target)
        return await asyncio.open_connection("127.0.0.1", self._target)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await asyncio.sleep(self._delay_seconds)
            await self._flowing.wait()
            writer.write(data)
            await writer.drain()
        writer.write_eof()
