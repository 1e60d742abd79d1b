"""The route that takes a tenant's policy out of use, and into use again."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Response

from proxy.routes.control import Body, Caller, CheckedRoute, Here, Text, answer, describe_answer, record_json
from proxy.routes.declared import Routes
from turnwise.store import policies

router = APIRouter(prefix="/v1/policies", route_class=CheckedRoute, tags=["policies"])


class Archival(Body):
    """Whether a policy is in use."""

    archived: bool = True
    """False takes it into use again."""


@router.post("/{policy}/archive", responses=describe_answer("NamedPolicy"))
async def archive_policy(
    policy: Annotated[Text, Path()], services: Here, principal: Caller, how: Archival | None = None
) -> Response:
    """Archive a policy of the caller's tenant, or with `{"archived": false}` take it into use again.

    Calls and new sessions of an archived policy get 409. It is not trained, and engines unload its adapters. Its
    versions, sessions and files stay.
    """
    archived = await services.writer.do(
        policies.archive_policy,
        principal.tenant,
        policy,
        is_archived=(how or Archival()).archived,
        max_policies=services.settings.tenant_max_policies,
    )
    await services.pool.refresh()
    return answer(record_json(archived))


ROUTES = Routes(router=router, actions={"POST /v1/policies/{policy}/archive": "activate"})
