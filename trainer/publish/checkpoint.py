"""Policy versions on disk: written atomically, renamed after a crash, removed when nothing uses them.

What engines read and what the trainer resumes from are siblings, `v000007/` with Hugging Face files and
`turnwise.json` alone, `v000007.trainer/` with optimizer and counts. Both are written beside their place, synced and
renamed, so a directory with a final name is complete. The ledger, not the disk, says which version counts; `latest`
is a convenience for people.

One trainer at a time writes into a directory: it holds a lock that the kernel releases with its process.

The tensors of a state are a checkpoint of `torch.distributed.checkpoint`: each process writes and reads its own shards,
or the first one all of them, and a run can go on in the other way and with another number of processes.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader

from trainer.model.loading import LIBRARY_ERRORS, bad_checkpoint, reason_of
from trainer.world import World
from turnwise import version_directory
from turnwise.errors import BadCheckpoint, NotWritten, SettingsError
from turnwise.files import lock, replaced, synchronise
from turnwise.types import Json
from turnwise.version_directory import LATEST, STATE_FILE

log = logging.getLogger(__name__)

TENSORS = "tensors"
SHARED_SECONDS = 60.0
"""How long a process waits for a file of another one; network file systems show it late."""
LOCK = ".lock"
WRITING = ".writing-"
REPLACED = ".replaced-"
UNPUBLISHED = "unpublished-"
"""Prefix of a directory that was set aside, because the database does not know its version."""


class Checkpoints:
    """The versions under one directory."""

    def __init__(self, directory: Path, *, keep: int) -> None:
        self.directory = directory
        self._keep = keep
        self._lock: TextIO | None = None

    def open(self) -> None:
        """Take the directory for this trainer, and remove what a killed one left incomplete; in its first process.

        Raises:
            SettingsError: Another trainer uses the directory, or nothing can be written into it.
        """
        if self._lock is not None:
            return
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self.directory / LOCK)
            for replaced in self.directory.glob(f"{REPLACED}*"):
                place = self.directory / replaced.name.removeprefix(REPLACED)
                if place.exists():
                    shutil.rmtree(replaced, ignore_errors=True)
                else:
                    replaced.replace(place)
            for leftover in self.directory.glob(f"{WRITING}*"):
                shutil.rmtree(leftover, ignore_errors=True)
        except OSError as error:
            raise SettingsError(
                f"policies_dir {str(self.directory)!r} cannot be used: {error}; name a directory that this user can "
                "write into"
            ) from error

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def policy_directory(self, version: int) -> Path:
        return version_directory.policy_directory(self.directory, version)

    def state_directory(self, version: int) -> Path:
        return version_directory.state_directory(self.directory, version)

    def has_state(self, version: int) -> bool:
        return version == 0 or self.state_directory(version).is_dir()

    def write_policy(self, version: int, write: Callable[[Path], None], manifest: Json) -> Path:
        """Write a version for engines and return its directory; `write` fills an empty one with the model's files.

        Raises:
            NotWritten: It cannot be written, as on a full disk.
        """
        place = self.policy_directory(version)
        with _appearing(place) as staging:
            write(staging)
            version_directory.write_manifest(staging, {"version": version, **manifest})
        return place.resolve()

    def write_state(
        self, version: int, values: dict[str, Any], tensors: dict[str, Any] | None, group: Any = None
    ) -> None:
        """Write what a resume from this version needs, and point `latest` at it; in all processes together.

        The first process writes its plain `values`, and each its shards of the nested dictionaries of `tensors`; a
        process without any writes nothing.

        Raises:
            NotWritten: A process could not write, as on a full disk.
            BadCheckpoint: A process wrote into another directory.
        """
        if tensors is None:
            return
        place = self.state_directory(version)
        if group is not None and torch.distributed.get_rank() != 0:
            torch.distributed.barrier(group)  # the first process clears the directory before anyone writes into it
            _save_tensors(tensors, _staging(place) / TENSORS, group)
            return
        with _appearing(place) as staging:
            if group is not None:
                torch.distributed.barrier(group)
            torch.save(values, staging / STATE_FILE)
            _save_tensors(tensors, staging / TENSORS, group)
            _check_shards(staging / TENSORS)
        latest = self.directory / LATEST
        with writing(latest), replaced(latest) as staged:
            staged.write_text(self.policy_directory(version).name + "\n", encoding="utf-8")

    def read_state(self, version: int) -> dict[str, Any]:
        """Return the values that `write_state` wrote.

        Raises:
            BadCheckpoint: There are none, or they cannot be read.
        """
        path = self.state_directory(version) / STATE_FILE
        if not path.exists():
            raise BadCheckpoint(
                f"policy version {version} has no trainer state at {str(path)!r}: name the policies_dir of the trainer "
                "that made it, restore it, or start a new ledger"
            )
        with bad_checkpoint(f"the trainer state {str(path)!r} cannot be read", "; restore it, or start a new ledger"):
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        return state

    def read_tensors(self, version: int, tensors: dict[str, Any], world: World) -> None:
        """Fill tensors, whole or sharded, with the values that `write_state` wrote; in all processes together.

        Raises:
            BadCheckpoint: They cannot be read, or are those of another model or optimizer.
        """
        path = self.state_directory(version) / TENSORS
        problem = f"the trainer state {str(path)!r} cannot be read, or does not fit this model and optimizer"

        def read(own: dict[str, Any], group: Any) -> None:
            with bad_checkpoint(problem), _without_warning():
                state_dict_loader.load(own, checkpoint_id=path, process_group=group, no_dist=group is None)

        world.fill(tensors, read)

    def discard_after(self, version: int) -> None:
        """Set aside the version that was written after this one and not published: a crash came in between.

        It is renamed, not removed: with an empty database, or one that is a version old, it may belong to another run.
        The one that was set aside before is removed, so that no number of crashes fills the disk.

        Raises:
            SettingsError: There are more of them. No crash leaves more than one, so the database is another one, or an
                older copy.
        """
        newer = [found for found in self.versions() if found > version]
        if newer and newer[-1] > version + 1:
            raise SettingsError(
                f"policies_dir {str(self.directory)!r} holds versions up to {newer[-1]}, but the database knows none "
                f"after {version}: it is the database of another run, or an older copy. Name the right database or "
                "another policies_dir; to go on from this database, move the newer versions away"
            )
        for before in self.directory.glob(f"{UNPUBLISHED}*") if newer else ():
            shutil.rmtree(before, ignore_errors=True)
        for found in newer:
            for place in (self.state_directory(found), self.policy_directory(found)):
                if place.exists():
                    aside = place.replace(place.parent / f"{UNPUBLISHED}{place.name}")
                    log.warning(
                        "%s is not in the database: it is now %s; delete it, or give it another name if it is needed",
                        place,
                        aside,
                    )

    def prune(self, protected: set[int]) -> list[int]:
        versions = self.versions()
        gone = [version for version in versions[: -self._keep] if version not in protected]
        for version in gone:
            # The state goes first: a version without state can still be served, one without weights cannot be resumed.
            shutil.rmtree(self.state_directory(version), ignore_errors=True)
            shutil.rmtree(self.policy_directory(version), ignore_errors=True)
        return gone

    def versions(self) -> list[int]:
        return version_directory.find_versions(self.directory) if self.directory.is_dir() else []


def _save_tensors(tensors: dict[str, Any], path: Path, group: Any) -> None:
    with writing(path), _without_warning():
        state_dict_saver.save(tensors, checkpoint_id=path, process_group=group, no_dist=group is None)


def _check_shards(path: Path) -> None:
    sizes: dict[Path, int] = {}
    for info in FileSystemReader(path).read_metadata().storage_data.values():
        file = path / info.relative_path
        sizes[file] = max(sizes.get(file, 0), info.offset + info.length)
    for file, size in sizes.items():
        if not comes_true(functools.partial(_holds, file, size)):
            raise BadCheckpoint(
                f"{str(file)!r}, which another process wrote, is not here: its machine saw this policies_dir at the "
                "start; mount it there again under the same path, or start again with directories of their own"
            )


def _holds(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size >= size


def comes_true(check: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + SHARED_SECONDS
    while not check():
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.1)
    return True


@contextlib.contextmanager
def _without_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _staging(place: Path) -> Path:
    return place.parent / f"{WRITING}{place.name}"


def _locked(path: Path) -> TextIO:
    try:
        return lock(path)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise SettingsError(
                f"another trainer uses policies_dir {str(path.parent)!r}: two would overwrite each other's versions. "
                "Stop it, or name another policies_dir and database"
            ) from error
        log.warning("%s cannot be locked (%s): make sure that no other trainer uses this directory", path, error)
    return path.open("a", encoding="utf-8")


@contextlib.contextmanager
def writing(place: Path) -> Iterator[None]:
    """Raise `NotWritten` where the block cannot write."""
    try:
        yield
    except LIBRARY_ERRORS as error:
        free = shutil.disk_usage(place.parent if place.parent.exists() else place.anchor).free
        raise NotWritten(
            f"{str(place)!r} on {socket.gethostname()!r} cannot be written: {reason_of(error)}. {free // 2**20} MiB "
            "are free there; the groups are not recorded, and the next start trains them again"
        ) from error


@contextlib.contextmanager
def _appearing(place: Path) -> Iterator[Path]:
    """Yield an empty directory; when the block succeeds, sync it and rename it to its place.

    What was in its place is complete there or aside at each moment, and `Checkpoints.open` puts it back.
    """
    staging, replaced = _staging(place), place.parent / f"{REPLACED}{place.name}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        with writing(place):
            staging.mkdir(parents=True)
            yield staging
            for path in [*staging.rglob("*"), staging]:
                synchronise(path)
            if place.exists():
                place.replace(replaced)
            staging.replace(place)
            synchronise(place.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
