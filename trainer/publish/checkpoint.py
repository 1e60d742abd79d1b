"""Policy versions on disk: each is written atomically, and none that is in use is removed.

What engines read and what the trainer resumes from are siblings, `v000007/` with Hugging Face files and
`turnwise.json` alone, `v000007.trainer/` with optimizer and counts. Both are written beside their place, synced and
renamed, so a directory with a final name is complete. The ledger, not the disk, says which version counts; `latest`
is a convenience for people.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from turnwise import version_directory
from turnwise.errors import BadCheckpoint
from turnwise.types import Json
from turnwise.version_directory import LATEST, STATE_FILE


class Checkpoints:
    """The versions under one directory."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory = directory
        self._keep = keep
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".writing-*"):
            shutil.rmtree(leftover)

    def policy_directory(self, version: int) -> Path:
        """Return the directory of a version, for engines."""
        return version_directory.policy_directory(self.directory, version)

    def state_directory(self, version: int) -> Path:
        """Return the directory of the trainer's state of a version."""
        return version_directory.state_directory(self.directory, version)

    def write_policy(self, version: int, write: Callable[[Path], None], manifest: Json) -> Path:
        """Write a version for engines; `write` fills an empty directory with the model's files."""
        place = self.policy_directory(version)
        with _appearing(place) as staging:
            write(staging)
            version_directory.write_manifest(staging, {"version": version, **manifest})
        return place

    def write_state(self, version: int, state: dict[str, Any]) -> None:
        """Write what a resume from this version needs, and point `latest` at it."""
        with _appearing(self.state_directory(version)) as staging:
            torch.save(state, staging / STATE_FILE)
        pointer = self.directory / f".{LATEST}"
        pointer.write_text(self.policy_directory(version).name + "\n", encoding="utf-8")
        pointer.replace(self.directory / LATEST)

    def read_state(self, version: int) -> dict[str, Any]:
        """Return what `write_state` wrote.

        Raises:
            BadCheckpoint: There is none, or it cannot be read.
        """
        path = self.state_directory(version) / STATE_FILE
        try:
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError as error:
            raise BadCheckpoint(
                f"policy version {version} has no trainer state at {str(path)!r}; restore it, or start a new ledger"
            ) from error
        except (RuntimeError, EOFError, OSError, ValueError) as error:
            raise BadCheckpoint(f"the trainer state {str(path)!r} cannot be read: {error}") from error
        return state

    def discard_after(self, version: int) -> None:
        """Remove versions that were written but never committed: a crash came in between."""
        for newer in [found for found in self.versions() if found > version]:
            self._remove(newer)

    def prune(self, protected: set[int]) -> list[int]:
        """Remove all but the newest `keep` versions and the protected ones; return what was removed."""
        versions = self.versions()
        gone = [version for version in versions[: -self._keep] if version not in protected]
        for version in gone:
            self._remove(version)
        return gone

    def versions(self) -> list[int]:
        """Return the versions on disk, oldest first."""
        return version_directory.find_versions(self.directory)

    def _remove(self, version: int) -> None:
        # The state goes first: a version without state can still be served, one without weights cannot be resumed.
        shutil.rmtree(self.state_directory(version), ignore_errors=True)
        shutil.rmtree(self.policy_directory(version), ignore_errors=True)


@contextlib.contextmanager
def _appearing(place: Path) -> Iterator[Path]:
    """Yield an empty directory; when the block succeeds, sync it and rename it to its place."""
    staging = place.parent / f".writing-{place.name}-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        yield staging
        for path in [*staging.rglob("*"), staging]:
            _sync(path)
        shutil.rmtree(place, ignore_errors=True)
        staging.replace(place)
        _sync(place.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
