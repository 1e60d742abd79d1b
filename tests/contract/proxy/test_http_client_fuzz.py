"""The HTTP client against answers that are split anywhere and against garbled ones: it returns or fails in time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.engines.http_client import Disconnected, HttpClient

SILENCE_SECONDS = 5.0
BODIES = st.lists(st.binary(max_size=40), max_size=6)
CUTS = st.lists(st.integers(0, 400), max_size=8)
SLOW = settings(suppress_health_check=[HealthCheck.too_slow])


def chunked(parts: list[bytes]) -> bytes:
    """Return an answer in chunked encoding; an empty part would end it."""
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts if part)
    return b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"


def with_length(parts: list[bytes]) -> bytes:
    """Return an answer that declares its length, after an interim one."""
    body = b"".join(parts)
    return b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """Return the data in pieces."""
    places = sorted({min(cut, len(data)) for cut in cuts} | {0, len(data)})
    return [data[begin:end] for begin, end in itertools.pairwise(places)]


async def exchange(pieces: list[bytes], *, times: int = 1) -> list[bytes]:
    """Send requests to a server that answers each one with the pieces and then closes its side; return the bodies."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            for _ in range(times):
                await reader.readuntil(b"\r\n\r\n")
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}", connect_seconds=5, silence_seconds=SILENCE_SECONDS)
    bodies = []
    try:
        async with asyncio.timeout(4 * SILENCE_SECONDS):
            for _ in range(times):
                with await client.request("GET", "/", b"", {}) as answer:
                    bodies.append(await answer.read())
    finally:
        client.close()
        server.close()
        await server.wait_closed()
    return bodies


@SLOW
@given(parts=BODIES, cuts=CUTS, is_chunked=st.booleans())
def test_an_answer_is_read_whole_wherever_the_network_splits_it_and_the_connection_is_reused(
    parts: list[bytes], cuts: list[int], is_chunked: bool
):
    data = chunked(parts) if is_chunked else with_length(parts)
    assert asyncio.run(exchange(split(data, cuts), times=2)) == [b"".join(parts)] * 2


@SLOW
@given(parts=BODIES, cuts=CUTS, at=st.integers(0, 200), noise=st.binary(min_size=1, max_size=20))
def test_a_garbled_answer_gives_a_body_or_an_error_within_the_read_timeout(
    parts: list[bytes], cuts: list[int], at: int, noise: bytes
):
    """Some bytes are replaced; the result may be a valid answer, a broken one, or one that ends too early."""
    whole = chunked(parts)
    garbled = whole[:at] + noise + whole[at + len(noise) :]
    with contextlib.suppress(Disconnected):
        assert len(asyncio.run(exchange(split(garbled, cuts)))) == 1


@SLOW
@given(parts=BODIES, length=st.integers(0, 300))
def test_an_answer_that_ends_early_is_an_error_and_not_a_short_body(parts: list[bytes], length: int):
    whole = chunked(parts)
    cut = whole[: min(length, len(whole) - 1)]
    try:
        bodies = asyncio.run(exchange([cut]))
    except Disconnected:
        return
    raise AssertionError(f"{cut!r} was read as {bodies!r}")
