"""Engines that sleep while a trainer on the same GPU computes, and give it their memory.

A trainer says at its own address whether it wants the memory, and the proxy drives vLLM's sleep mode. Running calls are
kept and new ones queue inside the engine, so none fails. A trainer that dies no longer answers, and the engines wake.
Level 1 moves the weights to host memory. Level 2 drops them, and the served version is loaded again at waking.
"""

from __future__ import annotations

import logging

from proxy.engines.engine import LOADING, Engine
from proxy.engines.pool import EnginePool
from proxy.reload.driver_lease import DriverLease
from proxy.reload.loader import weights_path
from proxy.reload.transfer import Transfers
from turnwise.types import PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

DROPS_WEIGHTS = 2
"""The level at which an engine's weights are lost."""


class Sleeper:
    """Brings engines to sleep and wakes them, as trainers ask for it."""

    def __init__(self, pool: EnginePool, transfers: Transfers, lease: DriverLease, *, seconds: float) -> None:
        self._pool = pool
        self._transfers = transfers
        self._lease = lease
        self._seconds = seconds
        self._may_sleep = True
        """Whether an engine may be asleep: another process, or an earlier one, may have brought it to sleep."""

    async def follow(self, active: PolicyVersion | None) -> bool:
        """Do what trainers ask for; return whether engines sleep, so that nothing may be loaded into them.

        Raises:
            EngineError: an engine did not do it.
        """
        wish = await self._transfers.wanted_sleep()
        if wish is None and not self._may_sleep:
            return False
        async with self._lease.held() as is_driver:
            if not is_driver:
                return wish is not None
            for engine in self._pool.serving:
                if wish is None:
                    await self.wake(engine, active)
                else:
                    await self._put_to_sleep(engine, wish.level, active)
        self._may_sleep = wish is not None
        if wish is not None:
            await self._transfers.confirm_sleep(wish)
        return wish is not None

    async def bring_awake(self, engine: Engine, active: PolicyVersion | None) -> bool:
        """Return whether an engine is awake, after waking one that no trainer needs asleep.

        Raises:
            EngineError: it did not wake.
        """
        if await engine.is_sleeping() and await self._transfers.wanted_sleep() is not None:
            return False
        await self.wake(engine, active)
        return True

    async def wake(self, engine: Engine, active: PolicyVersion | None) -> None:
        """Wake an engine that sleeps, with the weights of the served version.

        Raises:
            EngineError: it did not wake.
        """
        if not await engine.is_sleeping():
            return
        await engine.wake("weights", seconds=self._seconds)
        await engine.read_label()
        if engine.loaded_version is None:
            served = active if active is not None and active.kind is PolicyKind.FULL else engine.own_model
            await engine.load_weights(weights_path(served, engine), seconds=self._seconds)
            await engine.label_weights(served.version)
        await engine.wake("kv_cache", seconds=self._seconds)
        log.info("the engine at %s is awake", engine.url)

    async def _put_to_sleep(self, engine: Engine, level: int, active: PolicyVersion | None) -> None:
        if await engine.is_sleeping():
            return
        if active is not None and active.kind is PolicyKind.LORA:
            level = 1  # the second level would drop the adapters too
        if level == DROPS_WEIGHTS:
            await engine.label_weights(LOADING)  # whoever wakes it must load its weights
        await engine.sleep(level, seconds=self._seconds)
        log.info("the engine at %s sleeps at level %d for the trainer", engine.url, level)
