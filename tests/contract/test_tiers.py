"""What a test of tests/unit must not use fails it, and what the tiers cost is printed and fails nothing."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from support import tiers

FORBIDDEN = {
    "subprocess": ("starts a process", "subprocess.run(['true'], check=True)"),
    "fork": ("starts a process", "pid = os.fork()\n    os.waitpid(pid, 0) if pid else os._exit(0)"),
    "forkpty": ("starts a process", "pid, _ = os.forkpty()\n    os.waitpid(pid, 0) if pid else os._exit(0)"),
    "spawn": ("starts a process", "os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)"),
    "system": ("starts a process", "os.system('true')"),
    "multiprocessing": ("starts a process", "multiprocessing.get_context('spawn').Process(target=print).start()"),
    "port": ("listens on a port", "with socket.socket() as ours:\n        ours.listen()"),
    "asyncio": (
        "listens on a port",
        "async def serve():\n        (await asyncio.start_server(print, '::1', 0)).close()\n    asyncio.run(serve())",
    ),
}
IMPORTS = "import asyncio, multiprocessing, os, socket, subprocess\nimport pytest\nfrom support import tiers\n"
PLANTED = "".join(f"def test_{name}():\n    {body}\n" for name, (_, body) in FORBIDDEN.items())
POSTGRES = """
def test_postgres(postgres_server):
    assert postgres_server
def test_asked_postgres(request):
    assert request.getfixturevalue("postgres_server")
@pytest.mark.postgres
def test_marked(postgres_server):
    os.system("true")
def test_costly():
    before = tiers.cpu_seconds
    tiers.cpu_seconds = lambda: before() + 1000
"""
CONFTEST = """
import pytest
pytest_plugins = ["support.tiers"]
@pytest.fixture(scope="session")
def postgres_server():
    return "a server"
"""
MARKS = "[pytest]\nmarkers =\n    unit: u\n    contract: c\n    real: r\n    postgres: p\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints for a tree of tests with one planted test a forbidden use, divided among two workers."""
    tests = tmp_path_factory.mktemp("planted") / "tests"
    for tier in ("unit", "contract"):
        (tests / tier).mkdir(parents=True)
        (tests / tier / f"test_{tier}.py").write_text(IMPORTS + PLANTED + POSTGRES)
    (tests / "support").mkdir()
    shutil.copy(tiers.__file__, tests / "support")
    (tests / "conftest.py").write_text(CONFTEST)
    (tests / "pytest.ini").write_text(MARKS)
    plugins = ["no:cacheprovider", "xdist", "support.tiers"]
    argv = [sys.executable, "-m", "pytest", "-n", "2", "-o", "pythonpath=.", "-rEf", "unit", "contract"]
    argv += [part for plugin in plugins for part in ("-p", plugin)]
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    return subprocess.run(argv, cwd=tests, env=environment, check=False, capture_output=True, text=True).stdout


@pytest.mark.parametrize("name", [*FORBIDDEN, "postgres", "asked_postgres"])
def test_a_use_that_the_tier_forbids_fails_its_test(run, name):
    reason = FORBIDDEN[name][0] if name in FORBIDDEN else "uses PostgreSQL without the mark `postgres`"
    assert re.search(
        rf"^_+ ERROR at teardown of test_{name} _+\n.*\na test of tests/unit {reason}: ", run, re.MULTILINE
    ), run


def test_nothing_else_fails(run):
    """Other tiers may use all of it, a test with the mark may use PostgreSQL, and no cost is a failure."""
    failed = re.findall(r"^(?:ERROR|FAILED) (\S+)", run, re.MULTILINE)
    assert sorted(failed) == sorted(
        f"unit/test_unit.py::test_{name}" for name in (*FORBIDDEN, "postgres", "asked_postgres")
    )


def test_the_costs_of_all_workers_are_printed_by_tier_and_the_dearest_tests_first(run):
    num_tests = len(FORBIDDEN) + 4
    for tier in ("unit", "contract"):
        assert re.search(rf"^tests/{tier} took [0-9.]+ s of CPU time \({num_tests} tests\)$", run, re.MULTILINE), run
    dearest = re.findall(r"^ +([0-9.]+) s of CPU time: (\S+)$", run, re.MULTILINE)
    assert {test.partition("::")[2] for _, test in dearest[:2]} == {"test_costly"}
    assert float(dearest[0][0]) >= 1000
    assert len(dearest) == tiers.NUM_DEAREST
    assert [float(seconds) for seconds, _ in dearest] == sorted((float(s) for s, _ in dearest), reverse=True)
