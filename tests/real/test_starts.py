"""Starts of the real commands: the embedded database needs no second command, and a failure is one sentence."""

from __future__ import annotations

from pathlib import Path

from support.commands import run_turnwise
from support.proxies import StartProxy
from turnwise_fake_engine import RunningFakeEngine


def _refused(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run a command that must not start; return its status and its sentence on stderr."""
    done = run_turnwise(*arguments, cwd=directory, cold=arguments[0] == "train")
    assert "Traceback" not in done.stderr + done.stdout
    sentences = [line for line in done.stderr.splitlines() if line.startswith("turnwise: ")]
    assert len(sentences) == 1, done.stderr
    return done.returncode, sentences[0]


def test_a_second_proxy_on_the_port_of_a_running_one_leaves_it_alone(
    fake_engine: RunningFakeEngine, start_proxy: StartProxy, tmp_path: Path
) -> None:
    running = start_proxy(fake_engine.url)
    port = running.url.rpartition(":")[2]
    status, _ = _refused(tmp_path, "proxy", "--engine", fake_engine.url, "--port", port)
    assert status == 2
    assert running.process.poll() is None
