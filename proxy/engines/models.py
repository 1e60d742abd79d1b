"""Which names of models calls may ask for: those of the engines, which stand for the policy of the caller's key."""

from __future__ import annotations

from typing import ClassVar

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.engines.pool import EnginePool
from turnwise.adapter_names import is_adapter_name
from turnwise.errors import NotFound
from turnwise.types import Json


class Models:
    """The names of the engines' own models; a feature may accept others."""

    hint: ClassVar[str] = "this proxy knows no other name"

    def __init__(self, pool: EnginePool) -> None:
        self.pool = pool

    async def choose(self, call: Call, principal: Principal) -> None:
        """Set the policy, and its version, that a call asks for by the name of its model.

        Raises:
            NotFound: the name is not served.
        """
        call.policy_id = principal.policy_id
        self.check(principal.tenant, call.model)

    def check(self, tenant: str, name: str) -> None:  # noqa: ARG002  for subclasses
        """Check that calls of a tenant may ask for a name; the empty one is the served model's.

        Raises:
            NotFound: they may not.
        """
        if not name or self.accepts(name):
            return
        served = {engine.model for engine in self.pool.engines}
        hint = "the proxy itself chooses the policy version of a call" if is_adapter_name(name) else self.hint
        raise NotFound(
            f"model {name!r:.80} is not served; ask for {', '.join(map(repr, sorted(served)))}; {hint}",
            param="model",
            code="model_not_found",
        )

    def accepts(self, name: str) -> bool:
        """Return whether a name that is of no policy stands for the policy of the caller's key."""
        return any(engine.model == name for engine in self.pool.engines)

    def listed(self, models: list[Json]) -> list[Json]:
        """Return the models to list of those that an engine lists: its own one, without adapters."""
        return [model for model in models if not is_adapter_name(str(model["id"]))][:1]
