"""Reads of versions' files: what their errors mean."""

from __future__ import annotations

import errno

import pytest

from proxy.reload.version_files import VersionFiles
from turnwise.errors import BadCheckpoint, FilesNotRead, ReloadFailed


def failing(cause: OSError, *, as_bad: bool):
    def read() -> None:
        if as_bad:
            raise BadCheckpoint("v1/config.json cannot be read") from cause
        raise cause

    return read


@pytest.mark.parametrize("as_bad", [False, True])
async def test_a_file_system_that_does_not_answer_says_nothing_about_the_version(as_bad: bool):
    """The error of a soft NFS mount is a TimeoutError, which is no limit of ours."""
    files, error = VersionFiles(), TimeoutError(errno.ETIMEDOUT, "timed out")
    for _ in range(2):  # the second call does not read again at once
        with pytest.raises(FilesNotRead, match="the file system of 'v1' does not answer"):
            await files.read(("v1",), "v1", failing(error, as_bad=as_bad), seconds=60)


async def test_a_file_that_cannot_be_read_is_tried_again_and_one_that_is_missing_fails_the_version():
    files = VersionFiles()
    with pytest.raises(ReloadFailed, match="could not be read") as failed:
        await files.read(("v1",), "v1", failing(OSError(errno.EIO, "I/O error"), as_bad=False), seconds=60)
    assert failed.value.is_transient
    with pytest.raises(BadCheckpoint):
        await files.read(("v1",), "v1", failing(OSError(errno.ENOENT, "missing"), as_bad=True), seconds=60)
    assert await files.read(("v1",), "v1", lambda: 3, seconds=60) == 3
