"""Files of lines to which several runs append: a line that a kill or a full disk cut does not spoil the next one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path


def append_lines(path: Path, lines: Iterable[str], *, is_durable: bool = False) -> None:
    """Append lines, after the end of a last line that was cut.

    Args:
        path: A file, which may not exist yet, or a pipe or a device.
        lines: Without line ends.
        is_durable: Return only when the lines are on the disk.

    Raises:
        OSError: the lines are not written, or only a part of them.
    """
    text = "".join(f"{line}\n" for line in lines)
    start = "\n" if _is_cut(path) else ""
    with path.open("a", encoding="utf-8") as file:
        file.write(start + text)
        if is_durable:
            file.flush()
            os.fsync(file.fileno())


def _is_cut(path: Path) -> bool:
    """Return whether the last line has no end; only the last byte is read."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        if not file.seek(0, os.SEEK_END):
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
