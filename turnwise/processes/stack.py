"""The whole stack on one machine: which processes, with which flags, in which order.

The decision behind it: each part is started by its own command, as a person would start it, so what `turnwise up` runs
can be run by hand, and nothing works only in here.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path

from pydantic import Field

from turnwise.processes.supervisor import Child
from turnwise.settings import Settings

ENGINE_START_SECONDS = 600.0
"""A large model on a slow disk takes minutes."""


class UpSettings(Settings):
    """Settings of `turnwise up`."""

    model: str | None = None
    """Model directory or id; by default the small demo model, which is built here once."""
    database: str = "sqlite:///turnwise.db"
    """SQLAlchemy URL of the store."""
    host: str = "127.0.0.1"
    """Address of the proxy."""
    port: int = Field(default=8100, ge=1, le=65535)
    """Port of the proxy."""
    engine_port: int | None = Field(default=None, ge=1, le=65535)
    """Port of the engine; by default a free one."""
    runs_dir: Path = Path("runs/up")
    """Where logs, the demo model and policies go."""
    policies_dir: Path | None = None
    """Where the trainer writes policies; by default under `runs_dir`."""
    trainer_config: Path | None = None
    """Settings file of the trainer; by default the trainer's own defaults."""
    trainer: bool = True
    """Run a trainer; without one the proxy only captures."""


def children(settings: UpSettings, model: str) -> list[Child]:
    """Return the processes of the stack, in the order in which they start."""
    engine_port = settings.engine_port or free_port()
    engine_url = f"http://127.0.0.1:{engine_port}"
    proxy_url = f"http://{_reachable(settings.host)}:{settings.port}"
    stack = [
        Child(name="migrate", argv=command("db", "upgrade", "--database", settings.database), once=True),
        Child(
            name="engine",
            argv=command("engine", "--model", model, "--port", str(engine_port)),
            ready=f"{engine_url}/health",
            start_seconds=ENGINE_START_SECONDS,
        ),
        Child(
            name="proxy",
            argv=command(
                "proxy",
                *("--engine", engine_url, "--database", settings.database),
                *("--host", settings.host, "--port", str(settings.port)),
            ),
            ready=f"{proxy_url}/readyz",
        ),
    ]
    if settings.trainer:
        policies = settings.policies_dir or settings.runs_dir / "policies"
        config = ["--config", str(settings.trainer_config)] if settings.trainer_config else []
        flags = ["--database", settings.database, "--model", model, "--policies-dir", str(policies)]
        stack.append(Child(name="trainer", argv=command("train", *config, *flags), grace_seconds=30.0))
    return stack


def command(*arguments: str) -> list[str]:
    """Return the argv of one of our own commands."""
    return [sys.executable, "-m", "turnwise", *arguments]


def demo_model(directory: Path, say: Callable[[str, str], None], seed: int = 0) -> str:
    """Build the small demo model unless it stands already; return its directory."""
    from importlib import import_module

    small_model = import_module("turnwise.demo.small_model")
    if not (directory / small_model.SPEC_FILE).is_file():
        say("model", f"building the small demo model into {directory}, about a minute, once")
    return str(small_model.build_small_model(directory, small_model.SmallModelSpec(seed=seed)))


def free_port() -> int:
    """Return a port of loopback that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def _reachable(host: str) -> str:
    """Return an address to connect to for one to listen on."""
    return "127.0.0.1" if host in {"0.0.0.0", "::"} else host  # noqa: S104  compared, not bound
