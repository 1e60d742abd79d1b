"""The settings of limits and budgets."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from turnwise.settings import Settings


class LimitSettings(Settings):
    """What keys and tenants may use at once, in a minute and in all."""

    DIVIDED_ON_SQLITE: ClassVar[tuple[str, ...]] = tuple(
        f"{scope}_{limit}"
        for scope in ("key", "tenant")
        for limit in ("max_calls", "requests_per_minute", "tokens_per_minute")
    )
    queue_seconds: float = Field(default=0.0, ge=0)
    """How long a call over a limit waits in a fair queue before it is answered 429; 0 answers at once."""
    key_max_calls: int | None = Field(default=None, gt=0)
    """Concurrent calls of one key; by default without limit, as the settings below."""
    key_requests_per_minute: int | None = Field(default=None, gt=0)
    key_tokens_per_minute: int | None = Field(default=None, gt=0)
    """Prompt and sampled tokens of one key in a minute; counted when a call ends."""
    tenant_max_calls: int | None = Field(default=None, gt=0)
    """Concurrent calls of all keys of one tenant."""
    tenant_requests_per_minute: int | None = Field(default=None, gt=0)
    tenant_tokens_per_minute: int | None = Field(default=None, gt=0)
    key_token_budget: int | None = Field(default=None, gt=0)
    """Prompt and sampled tokens that one key may use in all; a key can have its own budget instead."""
    tenant_token_budget: int | None = Field(default=None, gt=0)
    """Prompt and sampled tokens that all keys of one tenant may use in all."""
    token_budget_days: int | None = Field(default=None, gt=0, le=3650)
    """Period of all token budgets in UTC days, today included; by default a budget is for good."""
