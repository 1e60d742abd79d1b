"""What a call names as its model: a policy, one of its versions, or a name that the setting `model_names` accepts."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Literal

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.engines.engine import adapter_version
from proxy.engines.pool import OWN_MODEL, EnginePool
from turnwise.errors import Conflict, NotFound
from turnwise.store import versions
from turnwise.store.database import Database
from turnwise.types import DEFAULT_POLICY, Json, Policy, PolicyStatus, PolicyVersion

Rule = Literal["policy", "refuse"]
MAX_NAME_LENGTH = 256
_VERSION = re.compile(r"[0-9]{1,9}")


class ModelNames:
    """The names that are served."""

    def __init__(self, rules: Mapping[str, Rule], pool: EnginePool, database: Database) -> None:
        self._rules = dict(rules)
        self._pool = pool
        self._database = database

    async def name_policy(self, call: Call, principal: Principal) -> None:
        """Set the policy, and its version, that a call names as its model; check a name that is of no policy.

        `NAME` is a policy of the caller's tenant or `default`, and `NAME@VERSION` is one of its versions. Another
        tenant's policy is a name like any other.

        Raises:
            NotFound: the policy has no such version, or the name is not served.
            Conflict: the version failed, or the policy is archived.
        """
        call.policy_id = principal.policy_id
        name, _, number = call.model.rpartition("@")
        named = name if _VERSION.fullmatch(number) else call.model
        policy = self._pool.find_policy(principal.tenant, named)
        if policy is None:
            self.check(call.model)
            if self._pool.archived:
                self._pool.check_in_use(principal.policy_id)
            return
        self._pool.check_in_use(policy.policy_id)
        call.policy_id, call.names_policy, is_version = policy.policy_id, True, named != call.model
        if is_version and (policy.policy_id, int(number)) == (DEFAULT_POLICY, 0):
            call.policy_version = OWN_MODEL
        elif is_version:
            call.policy_version = await self._read_version(policy, int(number))

    async def _read_version(self, policy: Policy, version: int) -> PolicyVersion:
        found = None
        with contextlib.suppress(NotFound):
            found = await self._database.fetch(versions.get_version, version)
        if found is None or found.policy_id != policy.policy_id:
            raise NotFound(f"policy {policy.name!r} has no version {version}", param="model", code="model_not_found")
        if found.status is PolicyStatus.FAILED:
            raise Conflict(f"version {version} failed: {found.error}", param="model", code="version_not_loaded")
        return found

    def check(self, name: str) -> None:
        """Check that a name stands for the served policy; an empty name always does.

        Raises:
            NotFound: it does not.
        """
        served = {engine.model for engine in self._pool.engines}
        if not name or name in served or self._is_policy(name):
            return
        if adapter_version(name) is not None:
            hint = "the proxy itself chooses the policy version of a call"
        else:
            hint = "the setting `model_names` says which other names are accepted"
        raise NotFound(
            f"model {name!r:.80} is not served; ask for {', '.join(map(repr, sorted(served)))}; {hint}",
            param="model",
            code="model_not_found",
        )

    def _is_policy(self, name: str) -> bool:
        if adapter_version(name) is not None or len(name) > MAX_NAME_LENGTH:
            return False
        return next((rule == "policy" for pattern, rule in self._rules.items() if fnmatchcase(name, pattern)), False)

    def listed(self, models: list[Json]) -> list[Json]:
        """Return the models to list: the engine's own, and every name that a rule accepts literally."""
        own = [model for model in models if adapter_version(str(model["id"])) is None][:1]
        known = {model["id"] for model in own}
        names = [pattern for pattern in self._rules if pattern not in known and not set(pattern) & set("*?[")]
        return own + [{**model, "id": name} for model in own for name in names if self._is_policy(name)]
