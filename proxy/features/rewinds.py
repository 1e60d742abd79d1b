"""The route by which a person chooses the version that is served: pins it, or goes back to it until the next one."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastapi import APIRouter, Response

from proxy.features.policies.routes import CHECK_SECONDS, PolicyRoute, Version, policies_json
from proxy.routes.control import Body, Caller, Here, answer, describe_answer
from proxy.routes.declared import Routes
from proxy.services import Services
from turnwise.features import policies, rewinds
from turnwise.store import versions
from turnwise.store.database import Connection
from turnwise.types import Policy, PolicyStatus, PolicyVersion
from turnwise.version_directory import exist_on_disk, on_disk

if TYPE_CHECKING:
    from proxy.routes.models import Answer

router = APIRouter(prefix="/v1/policies", route_class=PolicyRoute, tags=["policies"])


class Activation(Body):
    """How to activate a version."""

    pin: bool = True
    """Keep serving this version when newer ones are published; false serves it until a newer version is published."""


@router.post("/{version}/activate", responses=describe_answer("ActivationAnswer"))
async def activate_policy(
    version: Version, services: Here, principal: Caller, how: Activation | None = None
) -> Response:
    """Serve and pin this version to its policy's sessions, also if it failed before.

    A version whose files no longer exist gets 409.

    With `{"pin": false}` it is served until a newer version is published. For the newest version this means: follow
    the newest again. While an older version is pinned, that version samples all turns that the trainer trains on.
    """
    pin = (how or Activation()).pin

    def read(connection: Connection) -> tuple[PolicyVersion, Policy]:
        found = versions.get_version(connection, version)
        return found, policies.policy_of_tenant(connection, principal.tenant, found)

    policy, owned = await services.database.fetch(read)
    await _check_files_exist(services, policy)
    chosen = await services.writer.do(rewinds.choose_version, version, pin=pin)
    (document,) = await policies_json([chosen], services.files, {owned.policy_id: owned.name})
    return answer(
        {
            **document,
            "is_served": chosen.status is PolicyStatus.ACTIVE,
            "pinned_version": version if pin else None,
        }
    )


async def _check_files_exist(services: Services, version: PolicyVersion) -> None:
    """Do what `rewinds.check_files_exist` does, with its reads of the file system in the process for these."""
    if version.status is PolicyStatus.ACTIVE:
        return
    key, read = ("activate", str(version.version), version.path), functools.partial(on_disk, version)
    if await services.files.read(key, version.path, read, seconds=CHECK_SECONDS) is False:
        newest = await services.database.fetch(rewinds.newest_of, version)
        others = functools.partial(exist_on_disk, newest)
        exist = await services.files.read((*key, "others"), version.path, others, seconds=CHECK_SECONDS)
        raise rewinds.files_are_gone(version, exist)


def _answers() -> Iterable[type[Answer]]:
    from proxy.features.policies.answers import PolicyAnswer
    from proxy.routes.models import create, field

    activation = create(
        "ActivationAnswer",
        PolicyAnswer,
        "A version that was chosen to be served.",
        {
            "is_served": field(bool, "Whether engines serve it already; else they load it now."),
            "pinned_version": field(int | None, "The version that stays served whatever is published; or null."),
        },
    )
    return (activation,)


ROUTES = Routes(router=router, actions={"POST /v1/policies/{version}/activate": "activate"}, answers=_answers)
