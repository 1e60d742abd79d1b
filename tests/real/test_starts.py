"""Starts of the real commands: the embedded database needs no second command, and a failure is one sentence."""

from __future__ import annotations

import socket
from pathlib import Path

from support.commands import run_turnwise
from support.ports import free_port
from support.proxies import StartProxy
from turnwise_fake_engine import RunningFakeEngine


def _refused(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run a command that must not start; return its status and its sentence on stderr."""
    done = run_turnwise(*arguments, cwd=directory, cold=arguments[0] == "train")
    assert "Traceback" not in done.stderr + done.stdout
    sentences = [line for line in done.stderr.splitlines() if line.startswith("turnwise: ")]
    assert len(sentences) == 1, done.stderr
    return done.returncode, sentences[0]


def test_a_proxy_on_a_taken_port_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, sentence = _refused(tmp_path, "proxy", "--port", str(port))
    assert (status, f"cannot listen on 127.0.0.1:{port}" in sentence) == (2, True)


def test_a_proxy_beyond_loopback_without_a_key_does_not_start(tmp_path: Path) -> None:
    status, sentence = _refused(tmp_path, "proxy", "--host", "0.0.0.0", "--port", str(free_port()))
    assert (status, "turnwise keys create" in sentence) == (2, True)


def test_a_trainer_without_its_model_does_not_start(tmp_path: Path) -> None:
    status, sentence = _refused(tmp_path, "train", "--model", "./nowhere")
    assert (status, "there is no model directory" in sentence) == (2, True)


def test_a_second_proxy_on_the_port_of_a_running_one_leaves_it_alone(
    fake_engine: RunningFakeEngine, start_proxy: StartProxy, tmp_path: Path
) -> None:
    running = start_proxy(fake_engine.url)
    port = running.url.rpartition(":")[2]
    status, _ = _refused(tmp_path, "proxy", "--engine", fake_engine.url, "--port", port)
    assert status == 2
    assert running.process.poll() is None
