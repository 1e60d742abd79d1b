"""Names of models: which names a client may ask for. Every accepted name is the served policy.

Agents ask for the names that they know, such as `gpt-4.1-mini` or `claude-…`. The reply repeats the requested name; the
turn's policy version says which weights sampled it. The name of a policy version's adapter is never accepted, because
the proxy itself chooses the version of a call and stores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Literal

from proxy.engines.engine import Engine, adapter_version
from turnwise.errors import NotFound
from turnwise.types import Json

Rule = Literal["policy", "refuse"]
MAX_NAME_LENGTH = 256


class ModelNames:
    """The names that are served, by the setting `model_names`."""

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self._rules = dict(rules)

    def check(self, name: str, engines: Iterable[Engine]) -> None:
        """Check that a requested name stands for the served policy; an empty name always does.

        Raises:
            NotFound: it does not.
        """
        served = {engine.model for engine in engines}
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
        """Return whether the first rule that matches a name accepts it."""
        if adapter_version(name) is not None or len(name) > MAX_NAME_LENGTH:
            return False
        return next((rule == "policy" for pattern, rule in self._rules.items() if fnmatchcase(name, pattern)), False)

    def listed(self, models: list[Json]) -> list[Json]:
        """Return the models to list: the engine's own, and every name that a rule accepts literally."""
        own = [model for model in models if adapter_version(str(model["id"])) is None][:1]
        known = {model["id"] for model in own}
        names = [pattern for pattern in self._rules if pattern not in known and not set(pattern) & set("*?[")]
        return own + [{**model, "id": name} for model in own for name in names if self._is_policy(name)]
