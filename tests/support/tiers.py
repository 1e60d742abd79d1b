"""The tiers of the tests: what a test may use follows from its directory, and what the tiers cost is printed.

`unit` starts no process, listens on no port and uses no PostgreSQL; a test of it that does fails. `contract` starts
proxies over stand-in engines and SQLite. `real` is all else: vLLM, kills, training runs. No cost fails a test, because
it depends on the machine: `make test-cost` compares it with recorded numbers.
"""

import _posixsubprocess
import os
import resource
import socket
import sys
from collections import defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy.testing  # noqa: F401  numpy 1 starts `lscpu` when this is first imported, which is no test's process
import pytest

TESTS = Path(__file__).parents[1]
TIERS = ("unit", "contract", "real")
NUM_DEAREST = 10
COST = "CPU seconds"
"""Name of the property of a test's report that has its tier and its CPU time."""
STARTS_A_PROCESS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.system")
"""Python's audit events that mean a test is not one of `unit`."""

FINDS_LIBRARIES = "ldconfig"
"""Started by packages for CUDA as they are imported, which is no test's process either."""


def cpu_seconds() -> float:
    """Return the CPU time of this process and of the children whose end it has seen."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


class Tiers:
    def __init__(self) -> None:
        self._is_unit = False
        self._broken: str | None = None
        self._started = 0.0
        self._costs: dict[str, dict[str, float]] = defaultdict(dict)
        """CPU seconds by tier and test."""
        self._pid = os.getpid()
        sys.addaudithook(self._audit)
        # These have no audit event; multiprocessing calls the second one.
        socket.socket.listen = self._watched(socket.socket.listen, "listens on a port")
        _posixsubprocess.fork_exec = self._watched(_posixsubprocess.fork_exec, "starts a process")

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if (tier := tier_of(item.path)) is not None:
                item.add_marker(tier)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._is_unit = tier_of(item.path) == "unit" and item.get_closest_marker("postgres") is None
        self._broken, self._started = None, cpu_seconds()
        try:
            return (yield)
        finally:
            self._is_unit = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when != "teardown":
            return report
        report.user_properties.append((COST, (tier_of(item.path), cpu_seconds() - self._started)))
        if self._is_unit and report.passed:
            if "postgres_server" in item._request._fixture_defs:
                self._broken = "uses PostgreSQL without the mark `postgres`"
            if self._broken is not None:
                report.outcome = "failed"
                report.longrepr = f"a test of tests/unit {self._broken}: move it to tests/contract or tests/real"
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for name, value in report.user_properties if report.when == "teardown" else ():
            if name == COST and value[0] is not None:
                self._costs[value[0]][report.nodeid] = value[1]

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for tier in filter(self._costs.get, TIERS):
            costs = self._costs[tier]
            terminalreporter.write_line(
                f"tests/{tier} took {sum(costs.values()):.1f} s of CPU time ({len(costs)} tests)"
            )
        everything = {test: seconds for costs in self._costs.values() for test, seconds in costs.items()}
        for test in sorted(everything, key=everything.__getitem__, reverse=True)[:NUM_DEAREST]:
            terminalreporter.write_line(f"{everything[test]:8.1f} s of CPU time: {test}")
        skipped = [str(report.longrepr[2]) for report in terminalreporter.stats.get("skipped", [])]
        without_browser = [reason for reason in skipped if "Chromium" in reason]
        if without_browser:
            text = f"{len(without_browser)} tests of the page did not run. {without_browser[0]}"
            terminalreporter.write_line(text, yellow=True)

    def _watched(self, function: Callable[..., Any], reason: str) -> Callable[..., Any]:
        def watched(*arguments: Any) -> Any:
            self._use(reason, arguments)
            return function(*arguments)

        return watched

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS_A_PROCESS:
            self._use("starts a process", arguments)

    def _use(self, reason: str, arguments: tuple[Any, ...]) -> None:
        if self._is_unit and os.getpid() == self._pid and FINDS_LIBRARIES not in str(arguments[:1]):
            self._broken = reason


def tier_of(path: Path) -> str | None:
    """Return the tier of a test's file; None for files elsewhere."""
    if not path.is_relative_to(TESTS):
        return None
    name = path.relative_to(TESTS).parts[0]
    return name if name in TIERS else "real"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Tiers())
