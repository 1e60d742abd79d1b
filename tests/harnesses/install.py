"""Installs pinned agents into scratch directories; no install script runs, and no file of the user changes."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from harnesses.entries import Harness

INSTALL_SECONDS = 600


class InstallFailed(Exception):
    """A package that cannot be installed."""


def install(harness: Harness, scratch: Path) -> Path:
    """Install one agent unless it is there; return its directory.

    Raises:
        InstallFailed: with the end of what the installer printed.
    """
    directory = scratch / harness.package.replace("/", "_").replace("@", "_")
    if harness.kind == "dev" or (directory / ".installed").exists():
        return directory
    directory.mkdir(parents=True, exist_ok=True)
    home = scratch / "home"
    home.mkdir(exist_ok=True)
    commands = _npm(harness) if harness.kind == "npm" else _pip(harness, directory)
    for command in commands:
        done = subprocess.run(
            command,
            cwd=directory,
            env={**os.environ, "HOME": str(home)},
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            check=False,
        )
        if done.returncode != 0:
            raise InstallFailed(f"{' '.join(command)} failed: {(done.stdout + done.stderr)[-300:]}")
    (directory / ".installed").touch()
    return directory


def version(harness: Harness) -> str:
    """Return the installed version."""
    return harness.version or importlib.metadata.version(harness.package)


def _npm(harness: Harness) -> list[list[str]]:
    flags = ["--no-audit", "--no-fund", "--ignore-scripts", "--prefix", "."]
    return [["npm", "install", *flags, f"{harness.package}@{harness.version}"]]


def _pip(harness: Harness, directory: Path) -> list[list[str]]:
    pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    packages = [f"{harness.package}=={harness.version}", *harness.with_packages]
    return [[sys.executable, "-m", "venv", str(directory)], [*pip, *packages]]
