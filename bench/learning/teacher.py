"""Teachers for the tiny task that speak vLLM's wire format; each knows the rule for some classes of prompts."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import log

from recipes import NUM_CLASSES, VOCABULARY

RIGHT = 0.98
"""Probability that a teacher gives all right tokens together."""


def logprob(known: str, prompt_class: int, token: int) -> float:
    """Return a teacher's logprob of a token in a session of this class; all tokens are alike where it knows no rule."""
    if str(prompt_class) not in known:
        return -log(VOCABULARY)
    num_right = VOCABULARY // NUM_CLASSES
    if token % NUM_CLASSES == prompt_class % NUM_CLASSES:
        return log(RIGHT / num_right)
    return log((1 - RIGHT) / (VOCABULARY - num_right))


class _Server(ThreadingHTTPServer):
    known = ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        """Answer a request for `prompt_logprobs`; the class is the first token."""
        prompt = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["prompt"]
        known = self.server.known
        shown = [None, *({str(token): {"logprob": logprob(known, prompt[0], token)}} for token in prompt[1:])]
        raw = json.dumps({"choices": [{"prompt_logprobs": shown}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextlib.contextmanager
def serving_teacher(known: str) -> Iterator[str]:
    """Serve a teacher that knows the classes whose digits are in `known`; yield its address, with `/v1`."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.known = known
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
