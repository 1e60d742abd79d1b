"""When an engine sleeps and wakes: a trainer asks for its memory, and gets it until it says that it has computed."""

from __future__ import annotations

import dataclasses
import logging

from proxy.engines.engine import LOADING, Engine
from proxy.engines.pool import EnginePool
from proxy.features.sleep.settings import SleepSettings
from proxy.features.transfers import CONNECT_SECONDS, ask_trainer, first_answer
from proxy.reload.lease import DriverLease
from proxy.reload.loader import weights_path
from proxy.reload.parts import EngineMemory
from proxy.settings import ProxySettings
from turnwise.store.database import Database
from turnwise.types import PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

DROPS_WEIGHTS = 2


@dataclasses.dataclass(frozen=True, slots=True)
class SleepWish:
    """A trainer's request that engines give up their memory."""

    url: str
    level: int
    """1 or 2, as in vLLM."""


class Sleeper(EngineMemory):
    """Brings engines to sleep and wakes them, as trainers ask for it."""

    def __init__(self, settings: ProxySettings, database: Database, pool: EnginePool, lease: DriverLease) -> None:
        super().__init__(settings, database, pool, lease)
        self._is_on = isinstance(settings, SleepSettings) and settings.engine_sleep
        self._seconds = settings.reload_timeout_seconds
        self._may_sleep = True
        """Whether an engine may be asleep: another process, or an earlier one, may have brought it to sleep."""

    async def follow(self, active: PolicyVersion | None) -> bool:
        """Do what trainers ask for; return whether engines sleep, so that nothing may be loaded into them.

        Raises:
            EngineError: an engine did not do it.
        """
        if not self._is_on:
            return False
        wish = await self._wanted()
        if wish is None and not self._may_sleep:
            return False
        async with self.lease.held() as is_driver:
            if not is_driver:
                return wish is not None
            for engine in self.pool.serving:
                if wish is None:
                    await self.wake(engine, active)
                else:
                    await self._put_to_sleep(engine, wish.level, active)
        self._may_sleep = wish is not None
        if wish is not None:
            await ask_trainer(wish.url, "POST", "/engines", {"sleeping": True}, CONNECT_SECONDS)
        return wish is not None

    async def is_given_up(self, engine: Engine) -> bool:
        return self._is_on and await engine.has_flag("sleeping")

    async def take_back(self, engine: Engine, active: PolicyVersion | None) -> bool:
        """Return whether an engine is awake, after waking one that no trainer needs asleep."""
        if not self._is_on:
            return True
        if await engine.has_flag("sleeping") and await self._wanted() is not None:
            return False
        await self.wake(engine, active)
        await engine.read_label()
        return True

    async def _wanted(self) -> SleepWish | None:
        """Return a trainer's request that engines sleep; None where no trainer that answers has one."""
        answer = await first_answer(
            self.database, "/engines", CONNECT_SECONDS, lambda found: bool(found.get("sleep_level"))
        )
        if answer is None:
            return None
        url, found = answer
        return SleepWish(url, int(found["sleep_level"]))

    async def wake(self, engine: Engine, active: PolicyVersion | None) -> None:
        """Wake an engine that sleeps, with the weights of the served version.

        Raises:
            EngineError: it did not wake.
        """
        if not await engine.has_flag("sleeping"):
            return
        await self._take_back(engine, "weights")
        await engine.read_label()
        if engine.loaded_version is None:
            served = active if active is not None and active.kind is PolicyKind.FULL else engine.own_model
            await engine.load_weights(weights_path(served, engine), seconds=self._seconds)
            await engine.label_weights(served.version)
        await self._take_back(engine, "kv_cache")  # sampling resumes once the engine has both
        log.info("the engine at %s is awake", engine.url)

    async def _take_back(self, engine: Engine, part: str) -> None:
        await engine.ask("POST", "/wake_up", seconds=self._seconds, tags=part)

    async def _put_to_sleep(self, engine: Engine, level: int, active: PolicyVersion | None) -> None:
        if await engine.has_flag("sleeping"):
            return
        if active is not None and active.kind is PolicyKind.LORA:
            level = 1  # the second level would drop the adapters too
        if level == DROPS_WEIGHTS:
            await engine.label_weights(LOADING)  # whoever wakes it must load its weights
        # It stops sampling; running calls are kept, new ones queue.
        await engine.ask("POST", "/sleep", seconds=self._seconds, level=str(level), mode="keep")
        log.info("the engine at %s sleeps at level %d for the trainer", engine.url, level)
