"""A part that starts is waited for as long as it shows progress: by its log, its CPU time or its reads."""

from pathlib import Path

import pytest

from turnwise.processes import progress

LIMIT = 1000.0  # so 100 s without progress


class Start:
    """One start on a clock of its own."""

    def __init__(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.work, self.log = 0.0, (0.0, 0), log
        log.write_text("of an earlier start\n")
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(progress, "_work_of", lambda _session: self.work)
        self.progress = progress.Progress(log, log.stat().st_size)

    def problem_after(self, seconds: float) -> str | None:
        self.now += seconds
        self.progress.look(1)
        return self.progress.problem(LIMIT)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    made = Start(tmp_path / "log", monkeypatch)
    assert made.problem_after(10) is None
    return made


def test_a_part_that_shows_nothing_is_given_up_after_a_tenth_of_the_limit(start):
    assert start.problem_after(89) is None
    problem = start.problem_after(2)
    assert problem is not None
    assert "is not ready after 101 s and makes no progress" in problem
    assert "its log does not grow and it computes nothing, for 101 s; its log is empty" in problem


@pytest.mark.parametrize("sign", ["log", "cpu", "reads"])
def test_each_sign_of_progress_is_waited_for_up_to_the_limit(start, sign):
    for _ in range(10):  # 10 s have passed; 10 times 90 s follow
        if sign == "log":
            with start.log.open("a") as log:
                log.write("shard\rshard 2\n")
        cpu, reads = start.work
        start.work = (cpu + 90 * 0.5 * (sign == "cpu"), reads + (sign == "reads"))
        assert start.problem_after(90) is None
    problem = start.problem_after(91)
    assert problem is not None
    assert problem.startswith("is not ready after 1000 s")
    assert (sign == "log") == ("its log ends with 'shard 2'" in problem)


def test_a_process_that_only_polls_makes_no_progress(start):
    for _ in range(10):
        start.work = (start.work[0] + 0.1, 0)  # 1 % of a core
        start.problem_after(10)
    assert "makes no progress" in str(start.problem_after(1))
