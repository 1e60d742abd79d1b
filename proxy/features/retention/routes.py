"""Routes that delete a session, or everything of a tenant."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from proxy.features.page.beside import Page
from proxy.features.retention.deletion import Retention
from proxy.routes.control import Caller, CheckedRoute, Here, Id, answer, describe_answer
from proxy.routes.declared import Routes
from proxy.services import Services
from turnwise.features import retention

if TYPE_CHECKING:
    from proxy.routes.models import Answer

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])


@router.delete("/sessions/{session_id}", responses=describe_answer("DeletedAnswer"))
async def delete_session(session_id: Id, services: Here, principal: Caller) -> Response:
    """Delete a session with its turns and rewards; the answer names the policy versions that were trained on it."""
    deleted = await services.beside[Retention].delete_all(retention.delete_session, principal.tenant, session_id)
    return answer(await _finish(services, deleted))


@router.delete("/tenant", responses=describe_answer("DeletedAnswer"))
async def delete_tenant(services: Here, principal: Caller) -> Response:
    """Delete everything of the caller's tenant: sessions, turns, rewards, policies and keys, also the caller's own.

    The files of its policies' versions are deleted too. The answer names what is left.
    """
    total = await services.beside[Retention].delete_all(retention.delete_tenant, principal.tenant)
    services.forget_keys()
    services.beside[Page].counts.forget(principal.tenant)
    return answer(await _finish(services, total))


async def _finish(services: Services, deleted: retention.Deleted) -> retention.Deletion:
    """Remove the files of deleted policies; return what is left."""
    return await asyncio.to_thread(retention.finish, services.database, deleted)


def _answers() -> Iterable[type[Answer]]:
    from proxy.routes.models import answer_model

    return (answer_model("DeletedAnswer", retention.Deletion),)


ROUTES = Routes(
    router=router,
    actions={"DELETE /v1/sessions/{session_id}": "delete", "DELETE /v1/tenant": "delete"},
    answers=_answers,
)
