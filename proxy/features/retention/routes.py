"""Routes that delete a session, or everything of a tenant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query, Response

from proxy.features.lineage import followed
from proxy.features.page.beside import Page
from proxy.features.retention.deletion import Retention
from proxy.routes.control import Caller, CheckedRoute, Here, Id, answer, describe_answer
from proxy.routes.declared import Routes
from turnwise.features import retention
from turnwise.features.lineage.shaped import Then

if TYPE_CHECKING:
    from proxy.routes.models import Answer

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])


Wish = Annotated[
    Then, Query(description="What becomes of the caller's policies that serve a version which deleted sessions shaped.")
]


@router.delete("/sessions/{session_id}", responses=describe_answer("DeletedAnswer"))
async def delete_session(session_id: Id, services: Here, principal: Caller, then: Wish = Then.NOTHING) -> Response:
    """Delete a session with its turns and rewards; the answer names the policy versions that were trained on it.

    And the served ones that it shaped. With `then` policies that serve one go back to the last clean version
    (`rollback`) or are archived (`drop`; the default policy goes back to the base model).
    """
    deleted = await services.beside[Retention].delete_all(retention.delete_session, principal.tenant, session_id)
    return answer(await followed(services, principal, deleted, then))


@router.delete("/tenant", responses=describe_answer("DeletedAnswer"))
async def delete_tenant(services: Here, principal: Caller, then: Wish = Then.NOTHING) -> Response:
    """Delete everything of the caller's tenant: sessions, turns, rewards, policies and keys, also the caller's own.

    The files of its policies' versions are deleted too. The answer names what is left.
    """
    total = await services.beside[Retention].delete_all(retention.delete_tenant, principal.tenant)
    services.forget_keys()
    services.beside[Page].counts.forget(principal.tenant)
    return answer(await followed(services, principal, total, then))


def _answers() -> Iterable[type[Answer]]:
    from proxy.routes.models import answer_model

    return (answer_model("DeletedAnswer", retention.Deletion),)


ROUTES = Routes(
    router=router,
    actions={"DELETE /v1/sessions/{session_id}": "delete", "DELETE /v1/tenant": "delete"},
    answers=_answers,
)
