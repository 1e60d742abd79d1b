"""The route that says what shaped a version, and what follows for policies that a deletion leaves shaped."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Path, Query, Response

from proxy.auth import Principal
from proxy.routes.control import Caller, CheckedRoute, Here, Text, answer, describe_answer, is_operator
from proxy.routes.declared import Routes
from proxy.services import Services
from turnwise.features import retention
from turnwise.features.lineage import shaped, versions
from turnwise.features.lineage.shaped import Then
from turnwise.store.database import Connection
from turnwise.store.schema import NO_TENANT
from turnwise.types import Json, values_of

if TYPE_CHECKING:
    from proxy.routes.models import Answer

router = APIRouter(prefix="/v1/policies", route_class=CheckedRoute, tags=["policies"])


@router.get("/{policy}/lineage", responses=describe_answer("LineageAnswer"))
async def read_lineage(
    policy: Annotated[Text, Path()],
    services: Here,
    principal: Caller,
    version: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="By default the served one.")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[Text | None, Query(description="The last session of the page before.")] = None,
) -> Response:
    """Return what shaped a version: the sessions of the caller's tenant, with their end users, keys and imports.

    A session shapes a version if its tokens carried loss in it or in a version that it comes from, or if a session
    whose tokens did holds copies of its turns: a fork, or what a correction made. Other tenants' sessions and deleted
    ones are counted in `num_unnamed`. Only keys that may publish a directory see the manifest.
    """
    named = policy if version is None else f"{policy}@{version}"
    sees_manifest = await is_operator(services, principal)

    def read(connection: Connection) -> Json:
        found = versions.lineage(connection, principal.tenant, named, with_manifest=sees_manifest)
        some, more = versions.lineage_sessions(connection, principal.tenant, named, limit=limit, after=after)
        return {"object": "list", "data": values_of(some), "has_more": more, **values_of(found)}

    return answer(await services.database.fetch(read))


async def followed(
    services: Services, principal: Principal, deleted: retention.Deleted, then: Then
) -> retention.Deletion:
    """Return what a deletion removed and left, after what its caller chose for the policies that it leaves shaped.

    The default policy changes only for its owner.
    """
    owns = await is_operator(services, principal)
    seen = None if owns else principal.tenant
    done, dropped = [], []
    for each in await asyncio.to_thread(shaped.shaped_policies, services.database, deleted.shaped_versions, seen):
        if each.tenant == NO_TENANT and not owns and then is not Then.NOTHING:
            done.append(dataclasses.replace(each, reason="the default policy belongs to another tenant"))
            continue
        policy, gone = await services.writer.do(shaped.follow, each, then)
        done.append(policy)
        dropped += gone
    if then is not Then.NOTHING and done:
        await services.pool.refresh()
    return await asyncio.to_thread(retention.finish, services.database, deleted, done, dropped, seen)


def _answers() -> Iterable[type[Answer]]:
    from proxy.routes.models import answer_model, page_model

    fields = answer_model("LineageFields", versions.Lineage).model_fields
    whole = {name: (field.annotation, field) for name, field in fields.items()}
    return (page_model("LineageAnswer", versions.LineageSession, "What shaped a version, and its sessions.", **whole),)


ROUTES = Routes(router=router, actions={"GET /v1/policies/{policy}/lineage": "read"}, answers=_answers)
