"""A background task that is cancelled in the moment in which its wait ends, ends too."""

import asyncio
import types

from support.waiting import WAIT_SECONDS

from proxy.features.retention.deletion import Retention


def test_a_sweep_that_is_woken_as_the_process_ends_ends_with_it():
    """`asyncio.wait_for` of Python 3.11 returns then, and the process would wait for the task without an end."""

    async def end():
        swept = asyncio.Event()
        sweeping = Retention.__new__(Retention)
        sweeping._days, sweeping._has_deleted = None, asyncio.Event()
        sweeping._services = types.SimpleNamespace(database=types.SimpleNamespace(truncate_log=lambda: None))

        async def sweep():
            sweeping._has_deleted.clear()
            swept.set()

        sweeping._sweep = sweep
        task = asyncio.create_task(sweeping.run())
        await swept.wait()
        await asyncio.sleep(0)
        sweeping._has_deleted.set()
        await asyncio.sleep(0)
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=WAIT_SECONDS)
        assert done == {task}

    asyncio.run(end())
