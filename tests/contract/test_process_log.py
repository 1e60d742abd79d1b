"""The log on stderr never delays its process, and says how many lines were lost."""

from __future__ import annotations

import logging
import os
import re
import threading
from pathlib import Path

from support.waiting import wait_until

from turnwise.telemetry import MAX_QUEUED_BYTES, LogHandler

LOST = re.compile(r"^(\d+) lines of this log before this one are lost")
WHY = "its reader was too slow, or the disk was full"
TEXT = "x" * 1_000


def _record(text: object) -> logging.LogRecord:
    return logging.LogRecord("a", logging.INFO, "file.py", 7, text, (), None)


def test_a_log_that_nobody_reads_delays_no_line_and_the_lost_ones_are_reported() -> None:
    """Each line is then either read later, or part of a reported number."""
    read_end, write_end = os.pipe()
    handler, counted, read = LogHandler(write_end), [], []
    handler.count_lost = lambda: counted.append(1)
    num_lines = 2 * MAX_QUEUED_BYTES // 1_000
    for _ in range(num_lines):
        handler.emit(_record(TEXT))
    assert handler.num_lost == len(counted)
    assert num_lines / 3 < handler.num_lost < num_lines
    with os.fdopen(read_end, "r") as pipe:
        reader = threading.Thread(target=lambda: read.extend(pipe))
        reader.start()
        wait_until(lambda: read.count(TEXT + "\n") == num_lines - handler.num_lost, "what waited is read")
        handler.emit(_record("after"))
        handler.close()
        os.close(write_end)
        reader.join()
    reported = [int(found[1]) for line in read if (found := LOST.match(line))]
    assert sum(reported) == handler.num_lost == len(counted)
    assert read[-2:] == [f"{reported[-1]} lines of this log before this one are lost: {WHY}\n", "after\n"]


def test_a_log_on_a_full_disk_loses_lines_and_fails_no_caller(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        handler = LogHandler(full.fileno())
        handler.emit(_record("lost"))
        wait_until(lambda: handler.num_lost == 1, "the loss is counted")
        handler.close()
