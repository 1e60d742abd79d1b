"""Files that several processes or a kill may meet: locked, appended to, replaced whole, made durable."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO


def lock(path: Path) -> TextIO:
    """Open a file and lock it until it is closed; the kernel releases the lock however the process ends.

    The file is a regular one that is open for writing, because NFS passes only locks on such files to other machines.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be opened or locked at all.
    """
    file = path.open("a", encoding="utf-8")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise
    return file


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock of an existing file."""
    with path.open(encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def create_private(path: Path) -> None:
    """Create a file for its owner alone, if there is none: it will hold secrets, or what users wrote.

    Raises:
        OSError: there is none, and it cannot be created.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))


def synchronise(path: Path) -> None:
    """Make a file or a directory durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Yield another name in the directory of a file; what the block writes there is the file when the block ends.

    So the file is complete or as it was: after a kill, beside other writers, and on a full disk, where the block raises
    and nothing is left.
    """
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        yield staged
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """Write a file for its owner alone."""
    with replaced(path) as staged:
        create_private(staged)
        staged.write_text(text, encoding="utf-8")


def append_lines(path: Path, lines: Iterable[str], *, is_durable: bool = False) -> None:
    """Append lines without line ends, after the end of a last line that was cut.

    The file may be a pipe or a device; a new one is its owner's alone. With `is_durable` the lines are on the disk at
    the return.

    Raises:
        OSError: the lines are not written, or only a part of them.
    """
    text = "".join(f"{line}\n" for line in lines)
    start = "\n" if _is_cut(path) else ""
    create_private(path)
    with path.open("a", encoding="utf-8") as file:
        file.write(start + text)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def read_objects(path: Path) -> Iterator[Any]:
    """Yield the objects of JSON Lines, without a line that a kill cut; none where there is no file."""
    if not path.exists():
        return
    for line in path.read_bytes().split(b"\n"):  # `splitlines` would also cut texts at U+0085 and U+2028
        with contextlib.suppress(ValueError):  # also a character that was cut
            found = json.loads(line)
            if isinstance(found, dict):
                yield found


def _is_cut(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
