"""What `turnwise certify` hears from the processes that it starts."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any

import pytest
from support.ports import free_port

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

    with HTTPServer(("127.0.0.1", 0), Stated) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_the_number_format_is_the_one_that_the_engine_states(bfloat16_engine):
    assert certify.engine_dtype(bfloat16_engine) == "bfloat16"
    assert certify.engine_dtype("http://127.0.0.1:1") is None


def test_a_command_that_is_killed_or_late_is_told_from_one_that_fails(tmp_path, monkeypatch):
    log = tmp_path / "trainer.log"
    with pytest.raises(ChildFailed, match=r"there is no model directory '.*nowhere'"):
        certify._command(log, "train", "--model", str(tmp_path / "nowhere"))
    assert "fake-engine" in certify._command(log, "--help")
    serve = ("fake-engine", "--port", str(free_port()))

    def kill() -> None:
        while not multiprocessing.active_children():
            os.sched_yield()
        multiprocessing.active_children()[0].kill()

    killer = Thread(target=kill)
    killer.start()
    with pytest.raises(ChildFailed, match="turnwise fake-engine ended with signal SIGKILL"):
        certify._command(log, *serve)
    killer.join()
    monkeypatch.setattr(certify, "WAIT_SECONDS", 1.0)
    with pytest.raises(TimeoutError, match="turnwise fake-engine did not end within 1 s"):
        certify._command(log, *serve)
