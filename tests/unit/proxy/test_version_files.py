"""Reads of versions' files: what their errors mean."""

from __future__ import annotations

import errno

import pytest

from proxy.reload.checkpoint import VersionFiles
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


@pytest.mark.parametrize("as_bad", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
async def test_a_read_error_that_may_pass_is_tried_again(as_bad: bool, number: int):
    """A header's read error arrives as a `BadCheckpoint`, that of its values as it is."""
    files, error = VersionFiles(), OSError(number, "it may pass")
    with pytest.raises(ReloadFailed, match=r"could not be read: .*it may pass") as failed:
        await files.read(("v1",), "v1", failing(error, as_bad=as_bad), seconds=60)
    assert failed.value.is_transient
    assert await files.read(("v1",), "v1", lambda: 3, seconds=60) == 3


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOTDIR])
async def test_a_file_that_is_missing_or_locked_away_fails_the_version(number: int):
    with pytest.raises(BadCheckpoint):
        await VersionFiles().read(("v1",), "v1", failing(OSError(number, "missing"), as_bad=True), seconds=60)
