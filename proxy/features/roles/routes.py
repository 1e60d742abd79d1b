"""The route that corrects the role of a chain."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from proxy.routes.control import Body, Caller, CheckedRoute, Here, Id, answer, describe_answer
from proxy.routes.declared import Routes
from turnwise.features import roles
from turnwise.store import selection
from turnwise.types import Role

if TYPE_CHECKING:
    from proxy.routes.models import Answer

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["sessions"])


class WantedRole(Body):
    """The new role of a chain."""

    role: Role


@dataclasses.dataclass(slots=True)
class ChainRole:
    """The role of a chain, and its turns."""

    role: Role
    turn_ids: list[str]


@router.post("/turns/{turn_id}/role", responses=describe_answer("ChainRole"))
async def set_role(turn_id: Id, wanted: WantedRole, services: Here, principal: Caller) -> Response:
    """Correct the role of all turns in a turn's chain. The role determines whether they are trained."""
    holder = await services.database.fetch(selection.session_of_turn, principal.tenant, turn_id, principal.session_id)
    turn_ids = await services.writer.do(roles.set_chain_role, principal.tenant, turn_id, wanted.role)
    services.forget_session(principal.tenant, holder)
    return answer(ChainRole(wanted.role, turn_ids))


def _answers() -> Iterable[type[Answer]]:
    from proxy.routes.models import model_of

    return (model_of(ChainRole),)


ROUTES = Routes(router=router, actions={"POST /v1/turns/{turn_id}/role": "reward"}, answers=_answers)
