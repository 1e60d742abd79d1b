"""The log on stderr never delays its process, and says how many lines were lost."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
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


def test_a_lost_line_may_be_counted_by_code_that_logs(tmp_path: Path) -> None:
    with Path("/dev/full").open("wb") as full:
        handler = LogHandler(full.fileno())

        def log_once() -> None:
            handler.count_lost = lambda: None
            handler.emit(_record("lost too"))

        handler.count_lost = log_once
        handler.emit(_record("lost"))
        wait_until(lambda: handler.num_lost == 2, "both lines are counted")
        handler.close()


def test_a_log_line_that_cannot_be_formatted_is_replaced(tmp_path: Path) -> None:
    class Wrong:
        def __str__(self) -> str:
            raise ValueError("no text")

    with (tmp_path / "log").open("wb") as file:
        handler = LogHandler(file.fileno())
        handler.emit(_record(Wrong()))
        handler.emit(_record("\ud800"))
    assert (tmp_path / "log").read_text().splitlines() == [
        "file.py:7: the log line cannot be formatted: ValueError('no text')",
        "\\ud800",
    ]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_last_lines_of_a_process_reach_a_pipe(log_format: str) -> None:
    """Lines that wait for the writing thread are written before the process ends."""
    code = (
        "import logging\nfrom turnwise.telemetry import configure_logging\n"
        f"configure_logging('info', {log_format!r})\n"
        "for number in range(1000): logging.info('line %d', number)"
    )
    ended = subprocess.run([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, timeout=60, check=True)
    lines = ended.stderr.splitlines()
    assert len(lines) == 1000
    last = json.loads(lines[-1])["message"] if log_format == "json" else lines[-1].partition("root: ")[2]
    assert last == "line 999"
