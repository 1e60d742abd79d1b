"""The route by which a caller reads the budgets that its calls are charged to."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastapi import APIRouter, Response

from proxy.features.limits import CallLimits
from proxy.routes.control import Caller, CheckedRoute, Here, answer, describe_answer
from proxy.routes.declared import Routes

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["operations"])


@dataclasses.dataclass(slots=True)
class Spending:
    """The tokens of one budget."""

    token_budget: int | None
    """Prompt and sampled tokens; null for no budget."""
    tokens_used: int
    """Counted while any budget is set."""


@dataclasses.dataclass(slots=True)
class Budget:
    """The token budgets that the caller's calls are charged to."""

    key: Spending
    tenant: Spending
    days: int | None
    """Period of both budgets in UTC days, today included; null for budgets that are never renewed."""


@router.get("/budget", responses=describe_answer("BudgetAnswer"))
async def budget(services: Here, principal: Caller) -> Response:
    """Return the token budgets of the caller's key and tenant, and what is used of them."""
    budgets = services.steps.of(CallLimits).budgets
    accounts = await budgets.accounts(principal)
    key, tenant = [Spending(account.budget, account.num_tokens) for account in accounts]
    return answer(Budget(key, tenant, budgets.days))


def _answers() -> list[type[Any]]:
    from proxy.routes.models import answer_model

    return [answer_model("BudgetAnswer", Budget)]


ROUTES = Routes(router=router, actions={"GET /v1/budget": "read"}, answers=_answers)
