"""Reads of versions' files in the process for them: what is waited for, tried again, or fails the version."""

import contextlib
import errno
import functools
import os
from collections.abc import Iterator

import pytest
from support import stalled_files
from support.waiting import wait_until

from proxy.reload.version_files import ReadingProcess, VersionFiles
from turnwise.errors import BadCheckpoint, FilesNotRead, ReloadFailed


@pytest.fixture
def process() -> Iterator[ReadingProcess]:
    process = ReadingProcess()
    yield process
    process.close()


@pytest.fixture
def files(process: ReadingProcess) -> VersionFiles:
    return VersionFiles(process)


def failing(number: int, *, as_bad: bool):
    return functools.partial(stalled_files.fail, OSError(number, "it may pass"), as_bad=as_bad)


@pytest.mark.parametrize("as_bad", [False, True])
async def test_a_file_system_that_does_not_answer_says_nothing_about_the_version(files, as_bad):
    """The error of a soft NFS mount is a TimeoutError, which is no limit of ours."""
    for _ in range(2):  # the second call does not read again at once
        with pytest.raises(FilesNotRead, match="the file system of 'v1' does not answer"):
            await files.read(("v1",), "v1", failing(errno.ETIMEDOUT, as_bad=as_bad), seconds=None)


@pytest.mark.parametrize("as_bad", [False, True])
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
async def test_a_read_error_that_may_pass_is_tried_again(files, as_bad, number):
    """A header's read error arrives as a `BadCheckpoint`, that of its values as it is."""
    with pytest.raises(ReloadFailed, match=r"could not be read: .*it may pass") as failed:
        await files.read(("v1",), "v1", failing(number, as_bad=as_bad), seconds=None)
    assert failed.value.is_transient
    assert await files.read(("v1",), "v1", functools.partial(len, "abc"), seconds=None) == 3


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EACCES, errno.ENOTDIR])
async def test_a_file_that_is_missing_or_locked_away_fails_the_version(files, number):
    with pytest.raises(BadCheckpoint):
        await files.read(("v1",), "v1", failing(number, as_bad=True), seconds=None)


async def test_a_read_that_ends_its_process_is_tried_again_in_another_one(process, files):
    """As one does of a mapped file that becomes shorter. A read beside it fails with it, and may be repeated too."""
    before = await files.read(("pid",), "v1", os.getpid, seconds=None)
    with pytest.raises(ReloadFailed, match="the process that read its files ended") as failed:
        await files.read(("v1",), "v1", stalled_files.end_own_process, seconds=None)
    assert failed.value.is_transient
    after = await files.read(("pid",), "v1", os.getpid, seconds=None)
    assert os.getpid() not in (before, after)
    assert before != after


async def test_a_read_that_hangs_delays_no_other_and_not_the_end(process, files, tmp_path):
    """It goes on where it began: no second one starts beside it, and the process ends with it."""
    stalled = functools.partial(stalled_files.stalling, "v1", tmp_path / "answered", str, "v1")
    for _ in range(2):
        with pytest.raises(FilesNotRead, match="have been read for"):
            await files.read(("v1",), "v1", stalled, seconds=0.01)
    assert files.is_reading("v1")
    pid = await files.read(("v2",), "v2", os.getpid, seconds=None)
    process.close()

    def is_gone() -> bool:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, 0)
            return False
        return True

    wait_until(is_gone, "the process has ended")


async def test_a_result_that_cannot_be_sent_fails_its_read_alone(files):
    with pytest.raises(RuntimeError, match="cannot be sent"):
        await files.read(("v1",), "v1", functools.partial(open, os.devnull), seconds=None)
    assert await files.read(("v1",), "v1", functools.partial(len, "abc"), seconds=None) == 3
