"""Which policy a call asks for by the name of its model: `POLICY`, `POLICY@VERSION`, or a name that stands for its own.

Another tenant's policy is a name like any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.engines.models import Models
from proxy.engines.pool import OWN_MODEL, EnginePool
from proxy.features.policies.settings import PolicySettings
from proxy.metrics import Counted
from proxy.services import Beside
from turnwise.adapter_names import is_adapter_name
from turnwise.errors import Conflict, NotFound
from turnwise.store import versions
from turnwise.store.database import Database
from turnwise.store.schema import NO_TENANT
from turnwise.types import DEFAULT_POLICY, DEFAULT_POLICY_NAME, Json, Policy, PolicyStatus, PolicyVersion

if TYPE_CHECKING:
    from prometheus_client import Gauge

    from proxy.services import Services

MAX_NAME_LENGTH = 256
MAX_EXPORTED = 100
"""Named policies whose served version is a metric, the oldest ones: each has a label of its own."""
EXPORT_SECONDS = 0.2
_VERSION = re.compile(r"[0-9]{1,9}")


class NamedPolicies(Beside):
    """Lets calls name policies and their versions, and exports which versions are served."""

    gauges: ClassVar[Mapping[str, Counted]] = {
        "served": (
            "turnwise_named_policy_version",
            f"Served version of each named policy, of the first {MAX_EXPORTED}; 0 before its first one",
            ["tenant", "policy"],
        )
    }
    served: Gauge

    def __init__(self, services: Services) -> None:
        assert isinstance(services.settings, PolicySettings)
        self._pool = services.pool
        services.models = PolicyModels(services.pool, services.database, services.settings.model_names)

    async def run(self) -> None:
        while True:
            named = [each for each in self._pool.policies.values() if each.policy_id != DEFAULT_POLICY]
            for policy in named[:MAX_EXPORTED]:
                active = self._pool.state(policy.policy_id).active
                self.served.labels(policy.tenant, policy.name).set(0 if active is None else active.version)
            await asyncio.sleep(EXPORT_SECONDS)


class PolicyModels(Models):
    """The names of policies and of their versions, and those that the setting `model_names` accepts."""

    hint: ClassVar[str] = "the setting `model_names` says which other names are accepted"

    def __init__(self, pool: EnginePool, database: Database, rules: Mapping[str, str]) -> None:
        super().__init__(pool)
        self._database = database
        self._rules = rules
        self._read: Mapping[int, Policy] = {}
        self._named: Mapping[tuple[str, str], Policy] = {}
        """The policies of that reading, by tenant and name."""

    async def choose(self, call: Call, principal: Principal) -> None:
        """Set the policy, and its version, that a call names as its model; check a name that is of no policy.

        Raises:
            NotFound: the policy has no such version, or the name is not served.
            Conflict: the version failed, or the policy is archived.
        """
        call.policy_id = principal.policy_id
        name, _, number = call.model.rpartition("@")
        is_version = _VERSION.fullmatch(number) is not None
        policy = self._find(principal.tenant, name if is_version else call.model)
        if policy is None:
            if not self.accepts(call.model):
                super().check(principal.tenant, call.model)
            if self.pool.archived:
                self.pool.check_in_use(principal.policy_id)
            return
        self.pool.check_in_use(policy.policy_id)
        call.policy_id, call.names_policy = policy.policy_id, True
        if is_version and (policy.policy_id, int(number)) == (DEFAULT_POLICY, 0):
            call.policy_version = OWN_MODEL
        elif is_version:
            call.policy_version = await self._read_version(policy, int(number))

    def check(self, tenant: str, name: str) -> None:
        if self._find(tenant, name) is None:
            super().check(tenant, name)

    def accepts(self, name: str) -> bool:
        if not is_adapter_name(name) and len(name) <= MAX_NAME_LENGTH:
            for pattern, rule in self._rules.items():
                if fnmatchcase(name, pattern):
                    return rule == "policy" or super().accepts(name)
        return super().accepts(name)

    def listed(self, models: list[Json]) -> list[Json]:
        """Return the engine's own model, and every name that a rule accepts literally."""
        own = super().listed(models)
        known = {model["id"] for model in own}
        names = [pattern for pattern in self._rules if pattern not in known and not set(pattern) & set("*?[")]
        return own + [{**model, "id": name} for model in own for name in names if self.accepts(name)]

    def _find(self, tenant: str, name: str) -> Policy | None:
        if self._read is not self.pool.policies:
            self._read = self.pool.policies
            self._named = {(each.tenant, each.name): each for each in self._read.values()}
        return self._named.get((NO_TENANT if name == DEFAULT_POLICY_NAME else tenant, name))

    async def _read_version(self, policy: Policy, version: int) -> PolicyVersion:
        found = None
        with contextlib.suppress(NotFound):
            found = await self._database.fetch(versions.get_version, version)
        if found is None or found.policy_id != policy.policy_id:
            raise NotFound(f"policy {policy.name!r} has no version {version}", param="model", code="model_not_found")
        if found.status is PolicyStatus.FAILED:
            raise Conflict(f"version {version} failed: {found.error}", param="model", code="version_not_loaded")
        return found
