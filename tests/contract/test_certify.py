"""What `turnwise certify` hears from the processes that it starts."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from support.servers import serving
from support.waiting import WAIT_SECONDS

from turnwise.commands import certify
from turnwise.errors import ChildFailed


@pytest.fixture
def bfloat16_engine() -> Iterator[str]:
    """Yield the address of a server that states its number format as vLLM does."""

    class Stated(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            # Without this parameter vLLM states its settings as one text.
            config: Any = {"model_config": {"dtype": "torch.bfloat16"}}
            config = config if self.path == "/server_info?config_format=json" else str(config)
            self.wfile.write(json.dumps({"vllm_config": config}).encode())

        def log_message(self, *_: object) -> None: ...

    with serving(HTTPServer(("127.0.0.1", 0), Stated)) as url:
        yield url


def test_the_number_format_is_the_one_that_the_engine_states(bfloat16_engine):
    assert certify.engine_dtype(bfloat16_engine) == "bfloat16"
    assert certify.engine_dtype("http://127.0.0.1:1") is None


@pytest.mark.parametrize(
    ("program", "error", "text"),
    [
        ("import time; time.sleep(60)", TimeoutError, "turnwise train did not end within 1 s"),
        (
            "import os, sys; print('OldError: x', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)",
            ChildFailed,
            "turnwise train ended with signal SIGKILL",
        ),
        ("raise KeyError('qkv')", ChildFailed, "KeyError: 'qkv'"),
    ],
)
def test_a_command_that_is_killed_or_late_is_told_from_one_that_fails(tmp_path, monkeypatch, program, error, text):
    monkeypatch.setattr("turnwise.processes.stack.command", lambda *_: [sys.executable, "-c", program])
    monkeypatch.setattr(certify, "WAIT_SECONDS", 1.0 if error is TimeoutError else WAIT_SECONDS)
    with pytest.raises(error, match=text):
        certify._command(tmp_path / "trainer.log", "train")
