"""Starts of the real commands: the embedded database needs no second command, and a failure is one sentence."""

from __future__ import annotations

import contextlib
import socket
import sqlite3
from pathlib import Path

import pytest
from support.commands import run_turnwise
from support.ports import free_port
from support.private_postgres import PrivatePostgres
from support.proxies import StartProxy
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine

from turnwise.processes.stack import command
from turnwise.processes.supervisor import Child, Supervisor


def _refused(directory: Path, *arguments: str) -> tuple[int, str]:
    """Run a command that must not start; return its status and its sentence on stderr."""
    done = run_turnwise(*arguments, cwd=directory, cold=arguments[0] == "train")
    assert "Traceback" not in done.stderr + done.stdout
    sentences = [line for line in done.stderr.splitlines() if line.startswith("turnwise: ")]
    assert len(sentences) == 1, done.stderr
    return done.returncode, sentences[0]


def test_a_proxy_on_a_new_sqlite_file_creates_its_tables(fake_engine: RunningFakeEngine, tmp_path: Path) -> None:
    port = free_port()
    argv = command(
        "proxy", "--engine", fake_engine.url, "--database", f"sqlite:///{tmp_path}/new.db", "--port", str(port)
    )
    child = Child(name="proxy", argv=argv, ready=f"http://127.0.0.1:{port}/readyz", port=port)
    with Supervisor([child], log_directory=tmp_path):
        pass
    with contextlib.closing(sqlite3.connect(tmp_path / "new.db")) as connection:
        assert connection.execute("SELECT count(*) FROM sessions").fetchone() == (0,)


@pytest.mark.postgres
@pytest.mark.parametrize("arguments", [["proxy"], ["train", "--model", "owner/name"], ["sessions"]])
def test_on_postgresql_a_start_without_tables_names_the_command_that_creates_them(
    postgres_server: PrivatePostgres, tmp_path: Path, arguments
) -> None:
    url = postgres_server.url(postgres_server.create_database())
    port = ["--port", str(free_port())] if arguments == ["proxy"] else []
    status, sentence = _refused(tmp_path, *arguments, "--database", url, *port)
    assert status == 2
    assert "turnwise db upgrade" in sentence


def test_a_proxy_on_a_taken_port_does_not_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, sentence = _refused(tmp_path, "proxy", "--port", str(port))
    assert (status, f"cannot listen on 127.0.0.1:{port}" in sentence) == (2, True)


def test_a_proxy_beyond_loopback_without_a_key_does_not_start(tmp_path: Path) -> None:
    status, sentence = _refused(tmp_path, "proxy", "--host", "0.0.0.0", "--port", str(free_port()))
    assert (status, "turnwise keys create" in sentence) == (2, True)


def test_an_unsuitable_engine_is_refused_without_a_traceback(tmp_path: Path) -> None:
    with running_fake_engine(Script(logprobs_mode="raw_logprobs")) as engine:
        status, sentence = _refused(tmp_path, "proxy", "--engine", engine.url, "--port", str(free_port()))
    assert (status, "processed_logprobs" in sentence) == (1, True)


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
