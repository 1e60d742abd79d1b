"""The tiers of the tests: what a test may use, and what it costs, follow from its directory.

`unit` starts no process, listens on no port and uses no PostgreSQL; all of it takes a minute of CPU time. `contract`
starts proxies over stand-in engines and SQLite. `real` is all else: vLLM, kills, training runs. A test that exceeds its
tier fails, so nobody has to remember the limits.
"""

import os
import socket
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).parents[1]
TIERS = ("unit", "contract", "real")
UNIT_CPU_SECONDS = 60.0
"""Limit for all tests of `unit` together."""
TEST_CPU_SECONDS = 4.0
"""Limit for one test of `unit`, its fixtures included."""
NUM_ADDITIONS = 10**6
REFERENCE_SECONDS = 0.03
"""CPU time of `NUM_ADDITIONS` in a loop up to which the limits hold as they are; a slower machine gets more. It is an
estimate of a common desktop's time."""
BUDGET = "unit CPU seconds"
"""Name of the property of a test's report that has its CPU time."""
FORBIDDEN = {
    "subprocess.Popen": "starts a process",
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
}
"""Python's audit events that mean a test is not one of `unit`."""


def measured_slowness() -> float:
    """Return by how much a loop is slower here than on the reference machine, from 1 to 4."""
    started, total = time.process_time(), 0
    for number in range(NUM_ADDITIONS):
        total += number
    return min(4.0, max(1.0, (time.process_time() - started) / REFERENCE_SECONDS))


class Tiers:
    def __init__(self) -> None:
        self._is_unit = False
        self._broken: str | None = None
        self._started = 0.0
        self._total = 0.0
        self._slowness = measured_slowness()
        self._pid = os.getpid()
        sys.addaudithook(self._audit)
        socket.socket.listen = self._watched(socket.socket.listen)  # has no audit event

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (tier := tier_of(item.path)) is not None:
                item.add_marker(tier)
            uses_postgres = "postgres_server" in getattr(item, "fixturenames", ())
            if tier == "unit" and uses_postgres and item.get_closest_marker("postgres") is None:
                raise pytest.UsageError(f"{item.nodeid} uses PostgreSQL without the mark `postgres`")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._is_unit = tier_of(item.path) == "unit" and item.get_closest_marker("postgres") is None
        self._broken, self._started = None, time.process_time()
        try:
            return (yield)
        finally:
            self._is_unit = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if self._is_unit and call.when == "teardown" and report.passed:
            seconds = time.process_time() - self._started
            report.user_properties.append((BUDGET, seconds))
            reason = self._broken
            limit = TEST_CPU_SECONDS * self._slowness
            if reason is None and seconds > limit:
                reason = f"takes {seconds:.1f} s of CPU time, more than {limit:.1f} s"
            if reason is not None:
                report.outcome = "failed"
                report.longrepr = f"a test of tests/unit {reason}: move it to tests/contract or tests/real"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            self._total += sum(seconds for name, seconds in report.user_properties if name == BUDGET)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._total > UNIT_CPU_SECONDS * self._slowness and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._total:
            limit = UNIT_CPU_SECONDS * self._slowness
            terminalreporter.write_line(
                f"tests/unit took {self._total:.0f} s of CPU time; its limit on this machine is {limit:.0f} s",
                red=self._total > limit,
            )
        skipped = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
        without_browser = [reason for reason in skipped if "Chromium" in reason]
        if without_browser:
            text = f"{len(without_browser)} tests of the page did not run. {without_browser[0]}"
            terminalreporter.write_line(text, yellow=True)

    def _watched(self, listen: Callable[..., None]) -> Callable[..., None]:
        def listen_if_allowed(*arguments: Any) -> None:
            if self._is_unit:
                self._broken = "listens on a port"
            listen(*arguments)

        return listen_if_allowed

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_unit and event in FORBIDDEN and os.getpid() == self._pid:
            self._broken = FORBIDDEN[event]


def tier_of(path: Path) -> str | None:
    """Return the tier of a test's file; None for files elsewhere."""
    if not path.is_relative_to(TESTS):
        return None
    name = path.relative_to(TESTS).parts[0]
    return name if name in TIERS else "real"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers())
