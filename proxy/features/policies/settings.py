"""Which names of models are accepted, and how many policies a tenant may have."""

from __future__ import annotations

import json
from typing import Literal

from pydantic import Field, field_validator

from turnwise.settings import Settings


class PolicySettings(Settings):
    """Names of models, and named policies."""

    model_names: dict[str, Literal["policy", "refuse"]] = Field(default={"*": "policy"})
    """Names of models that clients may ask for: pattern → `policy`, the served policy, or `refuse`. The first pattern
    that matches decides; a name that none matches is refused. `strict` serves the engine's own name only."""
    tenant_max_policies: int | None = Field(default=None, ge=0)
    """Named policies of one tenant, without archived ones; by default any number."""

    @field_validator("model_names", mode="before")
    @classmethod
    def _parse_model_names(cls, value: object) -> object:
        if value == "strict":
            return {}
        if not isinstance(value, str):
            return value
        try:
            return json.loads(value)
        except json.JSONDecodeError as error:
            raise ValueError(f'{value!r} is not JSON; write {{"gpt-*": "policy"}} or strict') from error
