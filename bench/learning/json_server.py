"""A server on loopback that answers with JSON, for the teachers and the judge of the tiny task."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from turnwise.types import Json


class _Server(ThreadingHTTPServer):
    reply: Callable[[Json], Json]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        """Answer a request without a body."""
        self._answer({})

    def do_POST(self) -> None:
        """Answer a request with a JSON body."""
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Json) -> None:
        raw = json.dumps(self.server.reply(body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving(reply: Callable[[Json], Json]) -> Iterator[str]:
    """Serve the function's reply to each request body (empty for a GET); yield the address, with `/v1`."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.reply = reply
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
