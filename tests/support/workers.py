"""How pytest-xdist divides the tests among its workers: the tests of one file run in one worker, in their order.

So the servers that a file's tests share start once. All files that use the shared vLLM form one group, so one worker
starts it. That group runs first: it is the longest, and the other workers run the other files meanwhile, those that
take long first.

`--dist loadgroup` has no effect with pytest 9.2 (pytest-dev/pytest-xdist issue 1386), so the scheduler is defined here.
"""

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ROOT = Path(__file__).parents[2]
SHARED_ENGINE = "engine: RunningEngine"
"""The parameter of each test that uses the shared vLLM."""
LONGEST_FIRST = (
    "tests/real/test_page.py",
    "tests/real/trainer/test_workflows.py",
    "tests/real/test_chaos.py",
    "tests/real/trainer/test_divided.py",
    "tests/real/faults/test_kill.py",
    "tests/real/rollouts/test_run.py",
    "tests/real/test_originals.py",
    "tests/real/test_workers.py",
    "tests/contract/test_tenancy.py",
    "tests/contract/test_openapi.py",
    "tests/contract/test_inferred_sessions.py",
    "tests/contract/proxy/test_who_may_do_what.py",
    "tests/contract/trainer/test_source.py",
    "tests/real/faults/test_reload_faults.py",
    "tests/real/test_learning_bench.py",
    "tests/real/test_durability.py",
    "tests/real/faults/test_trainer_killed.py",
    "tests/real/test_compose_commands.py",
    "tests/real/test_documented_blocks.py",
    "tests/contract/store/test_migrations.py",
    "tests/unit/store/test_plans.py",
)
"""Files that take longer than 10 seconds. If one of them began last, the other workers would wait for it."""


@functools.cache
def uses_shared_engine(path: Path) -> bool:
    return SHARED_ENGINE in path.read_text()


def group_of(node_id: str) -> str:
    file = node_id.partition("::")[0]
    return "shared vLLM" if uses_shared_engine(ROOT / file) else file


class GroupScheduling(LoadScopeScheduling):
    """Gives each group to one worker, the next group to the worker that is free first."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)

    # The rest lets a run outlive a worker that died: xdist 3.8 leaves the replacement without an end of its work, and
    # cannot repeat the test that the worker died in, so the run waits for ever.

    def remove_node(self, node: WorkerController) -> str | None:
        """Return what a worker had left to the queue, but for the test that it was running, which is returned."""
        units = self.assigned_work.pop(node)
        running = next((test for unit in units.values() for test, done in unit.items() if not done), None)
        if running is not None:
            units[self._split_scope(running)][running] = True
            self.workqueue.update((scope, unit) for scope, unit in units.items() if not all(unit.values()))
        return running

    def mark_test_pending(self, item: str) -> None:
        self.workqueue.setdefault(self._split_scope(item), {})[item] = False

    def _reschedule(self, node: WorkerController) -> None:
        if node not in self.registered_collections:
            return  # a replacement that has not collected the tests yet
        super()._reschedule(node)
        if not self.workqueue:
            node.shutdown()  # a worker runs its last test only when it knows that none follows


def pytest_xdist_make_scheduler(config: pytest.Config, log: Callable[..., None]) -> GroupScheduling:
    config.option.loadscopereorder = False  # xdist would start the groups with the most tests first
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: rank(item.path))


def rank(path: Path) -> int:
    """Return the place of a file in the order of the run; files with the same one keep pytest's order."""
    if uses_shared_engine(path):
        return 0
    name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""
    return 1 + (LONGEST_FIRST.index(name) if name in LONGEST_FIRST else len(LONGEST_FIRST))
