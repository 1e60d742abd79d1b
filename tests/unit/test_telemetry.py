"""Log lines that nobody takes delay nothing and are counted."""

import json
import logging
import os
from pathlib import Path

import pytest
from support.waiting import wait_until

from proxy.features.tracing.observers import AccessLog
from turnwise.telemetry.logs import MAX_WAITING_LINES

LINE = {"path": "/" + "x" * 1_000}


@pytest.fixture
def lost() -> list[int]:
    return []


def test_a_full_disk_loses_lines_and_is_reported_once(caplog, tmp_path, lost):
    """Otherwise each reply would end with a traceback and a closed connection."""
    log = AccessLog(Path("/dev/full"), lambda: lost.append(1))
    with caplog.at_level(logging.WARNING):
        log.write({"path": "/a"})
        log.write({"path": "/b"})
        log.close()
    assert len(lost) == 2
    assert [record.getMessage() for record in caplog.records] == [
        "lines of the access log are lost: No space left on device; free the disk or leave it out"
    ]
    good = AccessLog(tmp_path / "log", lambda: lost.append(1))
    good.write({"path": "/c"})
    assert (tmp_path / "log").read_text() == '{"path": "/c"}\n'
    good.close()
    assert len(lost) == 2


def test_a_pipe_that_nobody_reads_delays_no_line_and_the_rest_is_counted(caplog, tmp_path, lost):
    """Each line is then either read later or counted as lost."""
    os.mkfifo(tmp_path / "pipe")
    log = AccessLog(tmp_path / "pipe", lambda: lost.append(1))
    num_lines = 2 * MAX_WAITING_LINES
    with caplog.at_level(logging.WARNING):
        for _ in range(num_lines):
            log.write(LINE)
        wait_until(lambda: caplog.records, "the loss is logged")
    assert [record.getMessage() for record in caplog.records] == [
        "lines of the access log are lost: its reader does not read them; restart it or leave it out"
    ]
    assert num_lines / 3 < len(lost) < num_lines
    with (tmp_path / "pipe").open("rb") as reader:
        read = [json.loads(reader.readline()) for _ in range(num_lines - len(lost))]
    assert read == [LINE] * len(read)
    num_lost = len(lost)
    log.write(LINE)
    log.close()
    assert len(lost) == num_lost
