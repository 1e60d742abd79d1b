"""The group in which an engine receives weights is used again only after a transfer of which everything arrived."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from proxy.engines.engine import Engine
from proxy.reload.staged_transfer import StagedVersion, load

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@contextlib.asynccontextmanager
async def server(silent_path: bytes) -> AsyncIterator[str]:
    """Serve as a trainer and an engine that accept all requests, except that one path is never answered."""
    tasks: set[asyncio.Task[None] | None] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].split()[0])
                await reader.readexactly(length)
                if silent_path not in head:
                    writer.write(OK)
        writer.close()

    running = await asyncio.start_server(answer, "127.0.0.1")
    host, port = running.sockets[0].getsockname()
    try:
        yield f"http://{host}:{port}"
    finally:
        running.close()
        await asyncio.gather(*filter(None, tasks))  # the client has closed its connections


@pytest.mark.parametrize(
    ("silent_path", "connection"), [(b"/nothing", "group"), (b"/update_weights", None)], ids=["whole", "timed out"]
)
async def test_an_engine_leaves_its_group_unless_all_weights_arrived(silent_path: bytes, connection: str | None):
    async with server(silent_path) as url:
        engine = Engine(url, timeout_seconds=60)
        engine.transfers.connection = "group"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5 if connection is None else 60):
                await load(StagedVersion(url, "id", [{}]), engine, 60)
        assert engine.transfers.connection == connection
        engine.close()
