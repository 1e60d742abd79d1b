"""The HTTP client for calls to engines, against a server that sends exactly the given bytes."""

import asyncio
import contextlib
import os
import socket
import threading

import pytest
import uvloop
from support.waiting import WAIT_SECONDS

from proxy.engines.http_client import BUFFERED_BYTES, Disconnected, HttpClient

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
ONE_READ = 1 << 18
"""The largest read of an event loop from a socket."""


class Server:
    """Answers each request by its script; the connection closes at the script's end."""

    def __init__(self, script):
        self._script = script
        self.requests: list[bytes] = []
        self.num_connections = 0
        self.has_lost = asyncio.Event()
        """Set when a client has closed a connection."""

    async def serve(self, reader, writer):
        self.num_connections += 1
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._script(self, reader, writer)
        writer.close()

    async def request(self, reader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0] or 0)
        self.requests.append(head + await reader.readexactly(length))
        return self.requests[-1]

    async def wait_for_the_end(self, reader):
        await reader.read()
        self.has_lost.set()


@contextlib.asynccontextmanager
async def serving(script, *, path="", user="", silence_seconds=WAIT_SECONDS):
    server = Server(script)
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    url = f"http://{user}127.0.0.1:{port}{path}"
    client = HttpClient(url, connect_seconds=WAIT_SECONDS, silence_seconds=silence_seconds)
    try:
        yield server, client
    finally:
        await client.close()
        listening.close()


async def post(client) -> tuple[int, bytes]:
    with await client.request("POST", "/", b"body", {}) as answer:
        return answer.status, await answer.read()


def answering(*pieces: bytes):
    async def script(server, reader, writer):
        await server.request(reader)
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)

    return script


def answering_once_then(answer=b"", *, after_seconds=0.0):
    """Return a script that answers one request, reads another, sends something or nothing, and closes."""

    async def script(server, reader, writer):
        await server.request(reader)
        writer.write(OK)
        await server.request(reader)
        if after_seconds:
            await asyncio.sleep(after_seconds)
        writer.write(answer)

    return script


def ok_with(body: bytes) -> bytes:
    return f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def test_a_request_is_sent_with_exactly_these_headers():
    async with serving(answering(OK), path="/below/", user="me:p%40ss@") as (server, client):
        with await client.request("POST", "/v1/x?y=1", b"body", {"x-request-id": "7"}) as answer:
            assert await answer.read() == b"ok"
    head, _, body = server.requests[0].partition(b"\r\n\r\n")
    line, *headers = head.split(b"\r\n")
    assert line == b"POST /below/v1/x?y=1 HTTP/1.1"
    sent = dict(header.lower().split(b": ") for header in headers)
    assert sent.pop(b"host").startswith(b"127.0.0.1:")
    own = {b"authorization": b"basic bwu6cebzcw==", b"content-type": b"application/json"}
    assert sent == own | {b"x-request-id": b"7", b"content-length": b"4"}
    assert body == b"body"


async def test_a_kept_connection_that_the_server_closes_is_replaced(monkeypatch):
    """The server closes it as if it had idled too long."""
    monkeypatch.setattr("proxy.engines.http_client.STALE_SECONDS", WAIT_SECONDS)
    async with serving(answering_once_then()) as (server, client):
        assert [await post(client), await post(client)] == [(200, b"ok")] * 2
    assert server.num_connections == 2
    assert len(server.requests) == 3


async def test_no_request_is_sent_on_a_connection_that_the_server_has_closed_while_this_process_was_busy(monkeypatch):
    """As an engine does after 5 s; a process that is stopped meanwhile reads it late, and counts no call as failed."""
    monkeypatch.setattr("proxy.engines.http_client.STALE_SECONDS", 0.0)
    has_closed = threading.Event()

    def serve() -> None:
        for _ in range(2):
            with listening.accept()[0] as connection:
                connection.recv(ONE_READ)
                connection.sendall(OK)
            has_closed.set()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        client = HttpClient(url, connect_seconds=WAIT_SECONDS, silence_seconds=WAIT_SECONDS)
        try:
            assert await post(client) == (200, b"ok")
            assert has_closed.wait(WAIT_SECONDS)  # the event loop stands still
            assert await post(client) == (200, b"ok")
        finally:
            await client.close()


async def closing(server, reader, _):
    await server.request(reader)


async def test_no_request_follows_another_whose_body_is_still_unsent():
    done = asyncio.Event()

    async def script(_, reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK)
        await done.wait()

    async with serving(script) as (server, client):
        for body in (b"x" * 2**26, b"body"):
            with await client.request("POST", "/", body) as answer:
                assert await answer.read() == b"ok"
        done.set()
    assert server.num_connections == 2


@pytest.mark.parametrize(
    ("script", "num_answered"),
    [
        (answering_once_then(after_seconds=0.1), 1),
        (closing, 0),
        (answering_once_then(OK[:-1]), 1),
        (answering_once_then(b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 20"), 1),
    ],
    ids=["closed late", "a new connection", "an incomplete answer", "a first byte of an answer"],
)
async def test_a_request_that_the_server_may_have_begun_to_process_is_not_sent_again(monkeypatch, script, num_answered):
    monkeypatch.setattr("proxy.engines.http_client.STALE_SECONDS", 0.05)
    async with serving(script) as (server, client):
        for _ in range(num_answered):
            await post(client)
        with pytest.raises(Disconnected, match="closed the connection"):
            await post(client)
    assert len(server.requests) == num_answered + 1


async def test_a_read_from_a_silent_server_times_out():
    async def script(server, reader, writer):
        await server.request(reader)
        writer.write(OK[:-1])
        await server.wait_for_the_end(reader)

    async with serving(script, silence_seconds=0.2) as (server, client):
        with pytest.raises(Disconnected, match=r"sent nothing for 0\.2 s"):
            await post(client)
        await asyncio.wait_for(server.has_lost.wait(), WAIT_SECONDS)


def pass_time(client: HttpClient, seconds: float) -> None:
    """Let the answer's checks find a silence that is longer by this time; the second check has no grace."""
    (answer,) = client.running
    answer._waiting_since -= seconds
    for _ in range(2):
        answer._check()


async def test_a_read_from_a_server_that_keeps_sending_does_not_time_out():
    may_send = asyncio.Event()

    async def script(server, reader, writer):
        await server.request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 8\r\n\r\n")
        for _ in range(8):
            await may_send.wait()
            may_send.clear()
            writer.write(b"x")

    async with serving(script, silence_seconds=600) as (_, client):
        with await client.request("GET", "/", b"", {}) as answer:
            for _ in range(8):
                reading = asyncio.create_task(answer.next_part())
                await asyncio.sleep(0)  # it waits from here on
                pass_time(client, 400)
                may_send.set()
                assert await reading == b"x"


async def test_a_slow_reader_is_no_silence_of_the_server():
    async with serving(answering(OK[:-1], b"k"), silence_seconds=600) as (_, client):
        with await client.request("GET", "/", b"", {}) as answer:
            pass_time(client, 1000)
            assert await answer.read() == b"ok"


async def test_a_slow_reader_makes_the_server_wait_and_gets_everything():
    body = bytes(range(256)) * (1 << 16)
    async with serving(answering(ok_with(body), OK)) as (_, client):
        parts = []
        with await client.request("GET", "/", b"", {}) as answer:
            while part := await answer.next_part():
                parts.append(part)
                await asyncio.sleep(0.01)  # much data arrives meanwhile
    assert b"".join(parts) == body
    assert max(map(len, parts)) <= BUFFERED_BYTES + ONE_READ


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_http_is_an_error(answer):
    async with serving(answering(answer)) as (_, client):
        with pytest.raises(Disconnected, match="not valid HTTP"):
            await post(client)


async def test_a_connection_that_is_not_accepted_in_time_is_an_error():
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, contextlib.ExitStack() as stack:
        port = full.getsockname()[1]
        for _ in range(3):  # more than the backlog
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        client = HttpClient(f"http://127.0.0.1:{port}", connect_seconds=0.2, silence_seconds=5)
        with pytest.raises(Disconnected, match=r"no connection within 0\.2 s"):
            await post(client)
        await client.close()


def test_tcp_probes_a_silent_connection_so_that_a_vanished_host_is_noticed():
    async def connect() -> None:
        async with serving(answering(OK[:-1])) as (_, client):
            with await client.request("GET", "/", b"", {}) as answer:
                transport = answer._connection.transport
                with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as same:
                    assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
                    assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000

    uvloop.run(connect())
