"""Installs pinned agents into scratch directories; no install script runs, and no file of the user changes.

Each package of PyPI gets its own environment, since frameworks pin each other's dependencies differently. uv
makes them, because it links files instead of copying them: an environment takes seconds.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from harnesses.entry import PINS, Harness

INSTALL_SECONDS = 600
REASON_CHARACTERS = 300


class InstallFailed(Exception):
    """A package that cannot be installed."""


def install(harness: Harness, scratch: Path) -> Path:
    """Install one agent unless its pinned versions are there; return its directory.

    Raises:
        InstallFailed: with the end of what the installer printed.
    """
    if harness.installer == "dev":
        return Path(sys.prefix)
    requirements = harness.requirements()
    # mini-swe-agent takes a path with `=` for an assignment.
    directory = scratch / re.sub(r"[^A-Za-z0-9.-]+", "_", "+".join(requirements))
    marker = directory / ".installed"
    if marker.exists() and marker.read_text() == "\n".join(requirements):
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    if harness.installer == "npm":
        _install_npm(requirements, directory, scratch)
    else:
        _install_pypi(requirements, directory, scratch, harness.python or sys.executable)
    marker.write_text("\n".join(requirements))
    return directory


def _install_npm(requirements: Sequence[str], directory: Path, scratch: Path) -> None:
    flags = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts", "--prefix", "."]
    before = PINS["index"]["before"]
    _run(["npm", "install", *flags, f"--before={before}", *requirements], directory, {"HOME": str(_home(scratch))})


def _install_pypi(requirements: Sequence[str], directory: Path, scratch: Path, interpreter: str) -> None:
    tools = scratch / "tools"
    uv = tools / "bin" / "uv"
    if not uv.exists():
        _run([sys.executable, "-m", "venv", str(tools)], scratch)
        _run([str(tools / "bin" / "pip"), "install", "--quiet", f"uv=={PINS['pypi']['uv']}"], scratch)
    shared = {"UV_CACHE_DIR": str(scratch / "uv-cache"), "UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never"}
    _run([str(uv), "venv", "--quiet", "--clear", "--python", interpreter, str(directory)], scratch, shared)
    before = ["--system-certs", "--exclude-newer", PINS["index"]["before"]]
    python = str(directory / "bin" / "python")
    _run([str(uv), "pip", "install", "--quiet", "--python", python, *before, *requirements], scratch, shared)


def _home(scratch: Path) -> Path:
    home = scratch / "home"
    home.mkdir(exist_ok=True)
    return home


def _run(command: Sequence[str], directory: Path, environment: Mapping[str, str] | None = None) -> None:
    if shutil.which(command[0]) is None:
        raise InstallFailed(f"{command[0]} is not on this machine")
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, **(environment or {})},
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise InstallFailed(f"`{Path(command[0]).name} {command[1]}` did not end within {INSTALL_SECONDS} s") from error
    if done.returncode != 0:
        reason = " ".join((done.stdout + done.stderr)[-REASON_CHARACTERS:].split())
        raise InstallFailed(f"`{Path(command[0]).name} {command[1]}` failed: {reason}")
