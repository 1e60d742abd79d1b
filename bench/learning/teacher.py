"""A teacher for the tiny task that speaks vLLM's wire format and knows the rule by heart."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import log

from recipes import NUM_CLASSES, VOCABULARY

RIGHT = 0.98
"""Probability that the teacher gives all right tokens together."""


def logprob(prompt_class: int, token: int) -> float:
    """Return the teacher's logprob of a token in a session of this class."""
    num_right = VOCABULARY // NUM_CLASSES
    if token % NUM_CLASSES == prompt_class % NUM_CLASSES:
        return log(RIGHT / num_right)
    return log((1 - RIGHT) / (VOCABULARY - num_right))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Answer a request for `prompt_logprobs`; the class is the first token."""
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        shown = [None, *({str(token): {"logprob": logprob(prompt[0], token)}} for token in prompt[1:])]
        raw = json.dumps({"choices": [{"prompt_logprobs": shown}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving_teacher() -> Iterator[str]:
    """Serve the teacher on loopback; yield its address, with `/v1`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
