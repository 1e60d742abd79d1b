"""The route that examines what this proxy serves with, as `turnwise doctor` does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from proxy.routes.control import Caller, CheckedRoute, Here, describe_answer, is_operator, page
from proxy.routes.declared import Routes
from turnwise.processes import installation

if TYPE_CHECKING:
    from proxy.routes.models import Answer

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["operations"])


@router.get("/doctor", responses=describe_answer("DoctorAnswer"))
async def examine(services: Here, principal: Caller) -> Response:
    """Examine engines and database as `turnwise doctor` does; each engine gets a few calls of one token.

    Of the trainers it names those of the tenant's own policies and of the default one; to keys of the tenant that owns
    the model it names all.
    """
    settings = services.settings
    tenant = None if await is_operator(services, principal) else principal.tenant
    engines, database = [each.url for each in services.pool.engines], settings.database.get_secret_value()
    options = settings.engine_client_options()
    of = engines, database, tenant, getattr(settings, "redactor", None)
    return await asyncio.to_thread(lambda: page(installation.examine_running(*of, **options)))


def _answers() -> Iterable[type[Answer]]:
    from proxy.routes.models import page_model

    return (page_model("DoctorAnswer", installation.Finding, "The findings about this installation."),)


ROUTES = Routes(router=router, actions={"GET /v1/doctor": "examine"}, answers=_answers)
