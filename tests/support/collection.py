"""Collects the tests without garbage collection: almost all objects made meanwhile stay until the end of the run.

Half of the CPU time of the collection was spent in the garbage collector, in each worker of pytest-xdist. In a worker
the collector then ignores these objects, so that it scans only what the tests make, and they are not freed at the end.
"""

import atexit
import gc
import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Turn the garbage collector off; let a worker end without freeing each object.

    Exit handlers that are registered later run before that; those that were registered earlier do not run. The status
    is always 0, as for every worker of pytest-xdist: the main process receives the results and ends with their status.
    """
    gc.disable()
    if hasattr(config, "workerinput"):
        atexit.register(os._exit, 0)


def pytest_collection_finish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        gc.freeze()
    gc.enable()
