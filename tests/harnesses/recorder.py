"""A relay in front of a real vLLM that lists its calls with their tokens, and fails calls as a script says.

The fake engine does both by itself. With the relay the same checks hold for a real engine: what it sampled is read from
its own replies, before the proxy sees them.
"""

import asyncio
import contextlib
import dataclasses
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator

import aiohttp
import uvicorn
from starlette.types import Message, Receive, Scope, Send
from turnwise_fake_engine import Fault
from turnwise_fake_engine.ledger import SeenCall

from turnwise.types import Json

CHAT_ROUTE = "/v1/chat/completions"
OWN_HEADERS = frozenset({"host", "content-length", "transfer-encoding", "connection"})
"""Headers of one connection, which are not passed on."""
START_SECONDS = 10.0
STOP_SECONDS = 5.0


@dataclasses.dataclass(slots=True)
class Recorder:
    engine_url: str
    url: str = ""
    """Its own base URL, without `/v1`."""
    calls: list[SeenCall] = dataclasses.field(default_factory=list)
    faults: list[Fault] = dataclasses.field(default_factory=list)
    """Faults of the next chat calls; of each, only the status and the count are used."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, until its reply is complete or the client disconnects."""
        body = await _read(receive)
        call = self._see(scope, body) if scope["path"] == CHAT_ROUTE else None
        if call is not None and (fault := self._take_fault()) is not None:
            call.outcome, call.fault = "faulted", fault.kind
            await _send_error(send, fault.status)
            return
        relaying = asyncio.create_task(self._relay(scope, body, call, send))
        leaving = asyncio.create_task(_until_disconnected(receive))
        try:
            await asyncio.wait({relaying, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if call is not None and call.outcome == "running":
                call.outcome = "aborted"
        finally:
            leaving.cancel()
            if not relaying.done():
                relaying.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await relaying

    def _see(self, scope: Scope, body: bytes) -> SeenCall:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        reply_id = f"chatcmpl-{headers.get('x-request-id', '')}"
        call = SeenCall(len(self.calls), reply_id, scope["path"], headers, json.loads(body))
        self.calls.append(call)
        return call

    def _take_fault(self) -> Fault | None:
        if not self.faults:
            return None
        fault = self.faults[0]
        fault.count -= 1
        if fault.count <= 0:
            self.faults.pop(0)
        return fault

    async def _relay(self, scope: Scope, body: bytes, call: SeenCall | None, send: Send) -> None:
        query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False) as client,
            client.request(
                scope["method"],
                f"{self.engine_url}{scope['path']}{query}",
                data=body,
                headers=[pair for pair in headers if pair[0].lower() not in OWN_HEADERS],
            ) as answer,
        ):
            kept = [pair for pair in answer.raw_headers if pair[0].decode().lower() not in OWN_HEADERS]
            await send({"type": "http.response.start", "status": answer.status, "headers": kept})
            async for part in _recorded(answer, call):
                await send({"type": "http.response.body", "body": part, "more_body": True})
            if call is not None:
                call.outcome = "finished"  # before the end is sent, after which the client counts as disconnected
            await send({"type": "http.response.body", "body": b""})


async def _recorded(answer: aiohttp.ClientResponse, call: SeenCall | None) -> AsyncIterator[bytes]:
    is_streamed = answer.content_type == "text/event-stream"
    unread = b""
    async for part in answer.content.iter_any():
        unread += part
        if call is not None and is_streamed:
            *events, unread = unread.split(b"\n\n")
            for event in events:
                _add_tokens(call, event.removeprefix(b"data: "))
        yield part
    if call is not None and not is_streamed:
        _add_tokens(call, unread)


def _add_tokens(call: SeenCall, text: bytes) -> None:
    if not text.startswith(b"{"):
        return
    chunk: Json = json.loads(text)
    call.prompt_token_ids = chunk.get("prompt_token_ids") or call.prompt_token_ids
    for choice in chunk.get("choices") or []:
        while len(call.token_ids) <= choice["index"]:
            call.token_ids.append([])
        call.token_ids[choice["index"]] += choice.get("token_ids") or []


@contextlib.contextmanager
def recording(engine_url: str) -> Iterator[Recorder]:
    """Run a relay in front of an engine, in a thread of this process, until the block ends.

    Raises:
        TimeoutError: it does not start.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(512)
        recorder = Recorder(engine_url, f"http://127.0.0.1:{listener.getsockname()[1]}")
        server = uvicorn.Server(
            uvicorn.Config(recorder, log_level="critical", access_log=False, lifespan="off", timeout_keep_alive=75)
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="recorder", daemon=True)
        thread.start()
        try:
            _wait_started(server)
            yield recorder
        finally:
            server.should_exit = True
            thread.join(STOP_SECONDS)


def _wait_started(server: uvicorn.Server) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the relay did not start within {START_SECONDS:g} s")
        time.sleep(0.005)


async def _read(receive: Receive) -> bytes:
    body = b""
    while True:
        message: Message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return body


async def _until_disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_error(send: Send, status: int) -> None:
    error = {"error": {"message": "a fault was asked for", "type": "InternalServerError", "code": status}}
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(error).encode()})
