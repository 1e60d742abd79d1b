"""What happens to the engine's rollouts around a batch of verl, without verl."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from turnwise_verl import AgentWorkflowEngine

from turnwise.errors import RolloutFailed
from turnwise.workflows import RolloutEngine, Workflow


class Memory(RolloutEngine):
    def __init__(self):
        self.seen = []

    async def wake_up(self):
        self.seen.append("awake")

    async def sleep(self):
        self.seen.append(("asleep", self.validate))


class Crash(Workflow):
    async def run(self, task, uid, **kwargs):
        self.reset(task, uid)
        raise RuntimeError("the tool crashed")


def test_the_engine_sleeps_again_also_after_a_failed_batch():
    """When a task raises, rLLM leaves it awake and in validation mode; here its state is restored."""
    columns = {"extra_info": np.array([{"q": 1}], object), "task_ids": np.array(["a"], object)}
    batch = SimpleNamespace(non_tensor_batch=columns, meta_info={"validate": True})
    rollouts = Memory()
    engine = AgentWorkflowEngine(Crash, {}, rollouts, n_parallel_tasks=1)
    with pytest.raises(RolloutFailed):
        asyncio.run(engine.execute_tasks_verl(batch))
    engine.shutdown()
    assert rollouts.seen == ["awake", ("asleep", False)]
