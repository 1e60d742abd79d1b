"""Limits and budgets of keys and tenants: which calls are admitted, and what their tokens are counted to."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from proxy.auth import OPEN
from proxy.calls.steps import WITH_KEY, CallStep
from proxy.features.limits.bodies import Bodies
from proxy.features.limits.budgets import Budgets
from proxy.features.limits.calls import Limits, Scope
from proxy.features.limits.settings import LimitSettings
from turnwise.features.limits import TOKENS_USED, used_tokens

if TYPE_CHECKING:
    from proxy.calls.capture import Running
    from proxy.services import Services


class CallLimits(CallStep):
    """Admits calls under all limits, and charges them to budgets."""

    def __init__(self, services: Services) -> None:
        settings = services.settings
        assert isinstance(settings, LimitSettings)
        self.limits = Limits(settings, settings.max_concurrent_calls, services.metrics)
        if settings.queue_seconds:
            services.max_calls = math.inf
        self.budgets = Budgets(settings, services.database, services.writer, services.metrics)
        if not (self.limits.are_set or self.budgets.are_set):
            self.marks = frozenset({WITH_KEY})
        services.closing.append(self.budgets.close)
        services.open_body = Bodies(settings.max_body_bytes).open
        self.columns = (TOKENS_USED._replace(read=used_tokens(self.budgets.since_day)),)

    async def admitted(self, running: Running) -> None:
        """Check the budgets and take a place, after waiting in the queue if there is none.

        Raises:
            BudgetSpent: the budget of the caller's key or tenant is spent.
            Overloaded: there is no place, or none within the queue's time.
        """
        principal, limits = running.principal, self.limits
        if self.budgets.are_set or principal.has_budget:
            await self.budgets.check(principal)
        scopes: list[Scope] = await limits.admit(principal) if limits.are_set else []
        running.kept[CallLimits] = scopes

    def ended(self, running: Running) -> None:
        if scopes := running.kept[CallLimits]:
            self.limits.leave(scopes, running.num_tokens)
        if self.budgets.are_set or running.principal.root_key_id != OPEN:
            self.budgets.charge(running.principal, running.num_tokens)
