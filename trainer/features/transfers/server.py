"""Hands the weights of versions in memory to engines at the request of the proxy that drives a reload.

The trainer only answers: it never calls an engine, and does not know how many there are. The address holds a random
key and stands in the ledger, so who can read the ledger can ask for weights. Of a request without the key only its
first line is read. Training does not wait for any of this.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from torch import Tensor

from turnwise.engine_plugin.channel import (
    CHUNK_BYTES,
    Channel,
    Rendezvous,
    TransferFailed,
)
from turnwise.types import Json

if TYPE_CHECKING:
    from trainer.features.transfers import HeldVersion, HeldVersions

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 16
MAX_CONNECTIONS = 64
READ_SECONDS = 60.0
"""How long a request may take until it is whole, counted from the end of the one before it on its connection."""
MOST_TRANSFERS = 64
SILENCE_SECONDS = 60.0
CLOSE_SECONDS = 20.0
"""Less than `turnwise up` waits for a trainer's end."""
COMING_SECONDS = 5.0
"""How long engines that were told of a transfer may take to come to it while the trainer ends."""
NO_PAGE = HTTPStatus.NOT_FOUND, {"error": "no such page"}
SLEEP_SECONDS = 60.0
"""How long the trainer waits for the engines to sleep before it computes all the same."""


class Transfer:
    """One version on its way to one engine, or to several that pass it on."""

    def __init__(self, payload: Tensor, rendezvous: Rendezvous, num_workers: int) -> None:
        self._num_workers = num_workers
        self._is_off = threading.Event()
        self.error: str | None = None
        # The thread alone refers to the payload, which is as large as the model, and to the rendezvous and its port.
        # Both are released when it ends, while the result stays known.
        self._thread = threading.Thread(target=self._send, args=(payload, rendezvous), name="weights", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    def call_off(self) -> None:
        """End it unless it has started: an engine does not take part, and the others wait no longer."""
        self._is_off.set()

    def _send(self, payload: Tensor, rendezvous: Rendezvous) -> None:
        try:
            rendezvous.start(self._num_workers, self._is_off)
            channel = Channel(
                rendezvous.store,
                rank=0,
                size=1 + self._num_workers,
                address=rendezvous.host,
                seconds=SILENCE_SECONDS,
            )
            channel.broadcast(payload, CHUNK_BYTES)
            if not channel.agree(is_good=True):
                self.error = "an engine's worker did not receive it whole"
        except TransferFailed as error:
            self.error = str(error)
        if self.error is not None:
            log.warning("a transfer of weights failed: %s", self.error)


class WeightServer:
    """Answers on its own port; each request has a thread."""

    def __init__(self, held: HeldVersions, host: str = "127.0.0.1") -> None:
        self._host = host
        self.held = held
        self._transfers: dict[str, Transfer] = {}
        self._is_closing = False
        self._sleep_level = 0
        """The level that engines should sleep at now; 0 while they should be awake."""
        self._sleeping = threading.Event()
        self._key = secrets.token_urlsafe(16)
        self._http = _LimitedServer((host, 0), self)
        self._thread = threading.Thread(target=self._http.serve_forever, name="weight-server", daemon=True)
        self._thread.start()
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._http.server_address[1]}/{self._key}"

    @contextlib.contextmanager
    def engines_asleep(self, level: int) -> Iterator[None]:
        """Let the proxy bring engines to sleep for the block, and wait until they sleep."""
        self._sleeping.clear()
        self._sleep_level = level
        try:
            if not self._sleeping.wait(SLEEP_SECONDS):
                log.warning(
                    "no engine was brought to sleep within %g s: is engine_sleep=true set in [proxy], and does the "
                    "proxy run?",
                    SLEEP_SECONDS,
                )
            yield
        finally:
            self._sleep_level = 0

    def close(self) -> None:
        """Stop answering once engines have what is being sent, or after `CLOSE_SECONDS`.

        Python aborts at its end (SIGABRT) if a thread is in gloo then, so the process waits for those that send. What
        not all engines have come to by then is called off.
        """
        self._is_closing = True
        self._wait_for_transfers(COMING_SECONDS)
        for transfer in list(self._transfers.values()):
            transfer.call_off()
        self._wait_for_transfers(CLOSE_SECONDS - COMING_SECONDS)
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def _wait_for_transfers(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        for transfer in list(self._transfers.values()):
            transfer.wait(max(0.0, until - time.monotonic()))

    def knows(self, path: str) -> bool:
        """Return whether a path holds the key."""
        key, *_ = _words(path)
        return secrets.compare_digest(key.encode(), self._key.encode())

    def answer(self, method: str, path: str, body: Json) -> tuple[HTTPStatus, Json]:
        """Answer a request whose path holds the key."""
        _, *words = _words(path)
        match (method, *words):
            case ("GET", "versions", str(version)) if version.isdigit():
                return self._describe(int(version))
            case ("GET", "engines"):
                return HTTPStatus.OK, {"sleep_level": self._sleep_level}
            case ("POST", "engines"):
                if body.get("sleeping") and self._sleep_level:
                    self._sleeping.set()
                return HTTPStatus.OK, {}
            case ("POST", "transfers"):
                return self._start(body)
            case ("GET", "transfers", str(transfer_id)) if transfer_id in self._transfers:
                transfer = self._transfers[transfer_id]
                transfer.wait()
                return HTTPStatus.OK, {"error": transfer.error}
            case ("POST", "transfers", str(transfer_id), "end") if transfer_id in self._transfers:
                self._transfers[transfer_id].call_off()
                return HTTPStatus.OK, {}
        return NO_PAGE

    def _find(self, version: int) -> HeldVersion | None:
        return None if self._is_closing else self.held.find(version)

    def _describe(self, version: int) -> tuple[HTTPStatus, Json]:
        held = self._find(version)
        if held is None:
            return _not_held(version)
        return HTTPStatus.OK, {"version": version, "num_bytes": held.layout.num_bytes, "probe": held.probe}

    def _start(self, body: Json) -> tuple[HTTPStatus, Json]:
        version, num_workers = body.get("version"), body.get("num_workers")
        if not isinstance(version, int) or not isinstance(num_workers, int) or num_workers < 1:
            return HTTPStatus.UNPROCESSABLE_ENTITY, {"error": f"version and num_workers must be numbers, not {body!r}"}
        held = self._find(version)
        if held is None:
            return _not_held(version)
        rendezvous = Rendezvous(self._host, SILENCE_SECONDS)
        transfer_id = secrets.token_hex(8)
        for old in list(self._transfers)[:-MOST_TRANSFERS]:
            self._transfers.pop(old, None)
        self._transfers[transfer_id] = Transfer(held.buffer, rendezvous, num_workers)
        info: Json = {
            "version": version,
            "host": self._host,
            "port": rendezvous.port,
            "world_size": 1 + num_workers,
            "layout": held.layout.as_json(),
            "checksum": held.checksum,
            "chunk_bytes": CHUNK_BYTES,
            "seconds": SILENCE_SECONDS,
        }
        return HTTPStatus.OK, {"transfer_id": transfer_id, "init_info": info}


def _not_held(version: int) -> tuple[HTTPStatus, Json]:
    return HTTPStatus.NOT_FOUND, {"error": f"version {version} is not in memory"}


def _words(path: str) -> list[str]:
    return urllib.parse.unquote(path).strip("/").split("/")


class _LimitedServer(ThreadingHTTPServer):
    """Closes connections beyond `MAX_CONNECTIONS` at once: each has a thread."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], weights: WeightServer) -> None:
        self.weights = weights
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            log.warning("a connection is closed, because %d ask for weights already", MAX_CONNECTIONS)
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client that left before its answer
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _LimitedServer
    raw_requestline: bytes
    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        """Answer one request; stop reading after `READ_SECONDS`, however slowly its bytes arrive."""
        self._deadline = threading.Timer(READ_SECONDS, self._stop_reading)
        self._deadline.daemon = True
        self._deadline.start()
        try:
            super().handle_one_request()
        finally:
            self._deadline.cancel()

    def _stop_reading(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self.connection.shutdown(socket.SHUT_RD)

    def parse_request(self) -> bool:
        line = self.raw_requestline.decode("latin-1").split()
        if len(line) > 1 and self.server.weights.knows(line[1]):
            return super().parse_request()
        self.requestline, self.request_version, self.command = "", self.protocol_version, ""
        self._send(*NO_PAGE, is_last=True)
        return False

    def do_GET(self) -> None:
        self._reply("GET", {})

    def do_POST(self) -> None:
        given = self.headers.get("content-length") or "0"
        if not given.isascii() or not given.isdigit() or int(given) > MAX_BODY_BYTES:
            message = f"the content-length {given!r:.40} is no number up to {MAX_BODY_BYTES}"
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": message}, is_last=True)
            return
        raw = self.rfile.read(int(given))
        if len(raw) < int(given):
            self.close_connection = True
            return
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = None
        self._reply("POST", body if isinstance(body, dict) else {})

    def _reply(self, method: str, body: Json) -> None:
        self._deadline.cancel()  # the answer may wait for a transfer
        self._send(*self.server.weights.answer(method, self.path, body))

    def _send(self, status: HTTPStatus, answer: Json, *, is_last: bool = False) -> None:
        encoded = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(encoded)))
        if is_last:
            self.send_header("connection", "close")  # what follows of the request is not read
        self.end_headers()
        self.wfile.write(encoded)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002  the base class's name
        log.debug("weights: %s", format % arguments)
