"""Run a fake engine in its own process, or in a thread for the duration of a `with` block."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from turnwise_fake_engine.ledger import EngineState, SeenCall
from turnwise_fake_engine.script import Fault, Rule, Script
from turnwise_fake_engine.server import create_app
from turnwise_fake_engine.tokens import write_tokenizer

START_SECONDS = 600.0
STOP_SECONDS = 5.0
KILL_SECONDS = 60.0
"""Deadline of a kill; the thread of one that was killed before answers none."""


@dataclasses.dataclass(frozen=True, slots=True)
class RunningFakeEngine:
    """A running fake engine with access to its state."""

    url: str
    """Its base URL, without `/v1`."""
    state: EngineState
    server: uvicorn.Server

    def kill(self) -> None:
        """Reset all of its connections and close its port, as `kill -9` of its process does.

        It returns once they are, unless the engine kills itself: its own loop does that next.
        """
        loop, ended = self.server.servers[0].get_loop(), threading.Event()

        def end() -> None:
            for listening in self.server.servers:
                listening.close()
            for each in list(self.server.server_state.connections):
                each.transport.abort()
            self.server.should_exit = self.server.force_exit = True
            loop.call_soon(ended.set)  # after the connections, which are reset in the loop's next round

        loop.call_soon_threadsafe(end)
        if asyncio._get_running_loop() is not loop:  # noqa: SLF001  asyncio's other name for it raises without one
            ended.wait(KILL_SECONDS)

    @property
    def calls(self) -> list[SeenCall]:
        """The calls that it received."""
        return self.state.calls

    def fail_next(self, fault: Fault) -> None:
        """Add a fault for the next calls."""
        self.state.script.faults.append(fault)

    def answer(self, rule: Rule) -> None:
        """Add a rule before the existing rules."""
        self.state.script.rules.insert(0, rule)


@contextlib.contextmanager
def running_fake_engine(script: Script | None = None, *, port: int = 0) -> Iterator[RunningFakeEngine]:
    """Serve a fake engine on loopback in a thread of this process.

    Raises:
        OSError: the port is taken.
        TimeoutError: it does not start.
    """
    with tempfile.TemporaryDirectory(prefix="fake-engine-") as directory, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(2048)
        state = EngineState(script or Script(), str(write_tokenizer(Path(directory))))
        server = uvicorn.Server(_config(state))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="fake-engine", daemon=True)
        thread.start()
        try:
            _wait_started(server, thread)
            yield RunningFakeEngine(f"http://127.0.0.1:{listener.getsockname()[1]}", state, server)
        finally:
            server.should_exit = True
            thread.join(2 * STOP_SECONDS)


def serve(script: Script, *, host: str, port: int) -> None:
    """Serve a fake engine until a signal ends the process.

    Raises:
        OSError: the address is taken.
    """
    with tempfile.TemporaryDirectory(prefix="fake-engine-") as directory, socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        state = EngineState(script, str(write_tokenizer(Path(directory))))
        uvicorn.Server(_config(state)).run(sockets=[listener])


def _config(state: EngineState) -> uvicorn.Config:
    return uvicorn.Config(
        create_app(state=state),
        log_level="critical",
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=75,
    )


def _wait_started(server: uvicorn.Server, thread: threading.Thread) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise TimeoutError(f"the fake engine did not start within {START_SECONDS:.0f} s")
        time.sleep(0.005)
