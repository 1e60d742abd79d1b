"""What a feature may replace of the reloader: how versions are loaded and rolled out, and who uses engines' memory."""

from __future__ import annotations

import dataclasses

from proxy.engines.engine import Engine
from proxy.engines.pool import EnginePool
from proxy.reload.lease import DriverLease
from proxy.reload.loader import Loader
from proxy.reload.rollout import Rollout
from proxy.settings import ProxySettings
from turnwise.store.database import Database
from turnwise.types import PolicyVersion


class EngineMemory:
    """Memory that engines always have for themselves."""

    def __init__(self, settings: ProxySettings, database: Database, pool: EnginePool, lease: DriverLease) -> None:
        self.settings = settings
        self.database = database
        self.pool = pool
        self.lease = lease

    async def follow(self, active: PolicyVersion | None) -> bool:  # noqa: ARG002
        """Return whether engines have given up their memory, so that nothing may be loaded into them."""
        return False

    async def is_given_up(self, engine: Engine) -> bool:  # noqa: ARG002
        return False

    async def take_back(self, engine: Engine, active: PolicyVersion | None) -> bool:  # noqa: ARG002
        """Return whether an engine that appeared has its memory, with a known label of its weights."""
        return True


@dataclasses.dataclass(frozen=True, slots=True)
class ReloadParts:
    """The classes of a reloader."""

    loader: type[Loader] = Loader
    rollout: type[Rollout] = Rollout
    memory: type[EngineMemory] = EngineMemory


CORE = ReloadParts()
