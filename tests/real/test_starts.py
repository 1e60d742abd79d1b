"""Starts of the real commands: the embedded database needs no second command, and a failure is one sentence."""

from __future__ import annotations

from pathlib import Path

from support.commands import run_turnwise
from support.proxies import StartProxy
from turnwise_fake_engine import RunningFakeEngine


def test_a_second_proxy_on_the_port_of_a_running_one_leaves_it_alone(
    fake_engine: RunningFakeEngine, start_proxy: StartProxy, tmp_path: Path
) -> None:
    running = start_proxy(fake_engine.url)
    port = running.url.rpartition(":")[2]
    done = run_turnwise("proxy", "--engine", fake_engine.url, "--port", port, cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr + done.stdout
    assert len([line for line in done.stderr.splitlines() if line.startswith("turnwise: ")]) == 1, done.stderr
    assert running.process.poll() is None
