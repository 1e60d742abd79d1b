"""The access log never fails a request."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from turnwise.telemetry import AccessLog


def test_a_full_disk_loses_lines_and_is_reported_once(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Otherwise each reply would end with a traceback and a closed connection."""
    log = AccessLog(Path("/dev/full"))
    with caplog.at_level(logging.WARNING):
        log.write({"path": "/a"})
        log.write({"path": "/b"})
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "lines of the access log are lost: No space left on device; free the disk or leave it out"
    ]
    good = AccessLog(tmp_path / "log")
    good.write({"path": "/c"})
    good.close()
    assert (tmp_path / "log").read_text() == '{"path": "/c"}\n'
