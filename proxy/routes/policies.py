"""Routes of policy versions: list, publish, pin and roll back."""

from __future__ import annotations

import asyncio
import functools
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field

from proxy.auth import Principal
from proxy.reload.checkpoint import check_policy
from proxy.routes.checked_route import Body, CheckedRoute, Count
from proxy.routes.serialise import Caller, Here, answer, caller, describe_answer, page, policies_json
from proxy.services import Services, services_of
from turnwise.errors import BadCheckpoint, Forbidden
from turnwise.store import keys, pages, policies
from turnwise.types import PolicyKind, PolicyStatus, PolicyVersion

Version = Annotated[int, Path(ge=0, le=2**31 - 1)]
CHECK_SECONDS = 30.0
"""How long a request waits for a check of a version's files; a retry waits for the same check."""


class PolicyRoute(CheckedRoute):
    """A route of policies: only the tenant that owns the model may change which version is served."""

    async def authorise(self, request: Request) -> None:
        """Check the caller, and for changes its tenant.

        Raises:
            Unauthorized: no key, or one that is unknown, expired or revoked.
            Forbidden: the key's role does not allow it, or the model belongs to another tenant.
        """
        principal = await caller(request)
        if request.method == "POST":
            await _check_owner(services_of(request), principal)


router = APIRouter(prefix="/v1/policies", route_class=PolicyRoute, tags=["policies"])


class NewPolicy(Body):
    """A version to publish."""

    version: Count | None = None
    """Number of the version; by default one more than the newest."""
    path: str = Field(min_length=1, max_length=4096, pattern=r"^[^\x00]*$")
    kind: PolicyKind = PolicyKind.FULL
    metrics: dict[str, Any] = Field(default_factory=dict)


class Activation(Body):
    """How to activate a version."""

    pin: bool = True
    """Keep serving this version when newer ones are published; false serves it until a newer version is published."""


@router.get("", responses=describe_answer("PolicyPage"))
async def list_policies(
    services: Here,
    _: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> Response:
    """List versions, newest first."""

    def read() -> tuple[list[PolicyVersion], bool, int | None]:
        with services.database.read() as connection:
            found, more = policies.list_policies(connection, limit=limit, after=after, max_bytes=pages.MAX_BYTES)
            return found, more, policies.pinned_version(connection)

    found, more, pinned = await asyncio.to_thread(read)
    listed = await policies_json(found, services.files)
    return answer({**page(listed, more), "pinned_version": pinned})


@router.post("", responses=describe_answer("PolicyAnswer"))
async def publish_policy(wanted: NewPolicy, services: Here, _: Caller) -> Response:
    """Publish a directory of weights as the next version; engines load it as soon as it has been checked.

    All tenants share the model, so only keys of its owner may publish: the tenant `policy_tenant`, or the only tenant
    with keys.
    """
    path, kind = wanted.path, wanted.kind
    model_path = next((engine.model_path for engine in services.pool.serving), None)

    def check() -> None:
        try:
            check_policy(path, kind, model_path)
        except OSError as error:
            raise BadCheckpoint(f"{path[:200]!r} cannot be read: {error.strerror}; publish a directory") from error

    key = ("publish", path, kind, str(model_path))
    await services.files.read(key, path, check, seconds=CHECK_SECONDS)
    published = await services.writer.do(
        policies.publish_next, wanted.path, wanted.kind, metrics=wanted.metrics, version=wanted.version
    )
    (document,) = await policies_json([published], services.files)
    return answer(document)


@router.post("/{version}/activate", responses=describe_answer("ActivationAnswer"))
async def activate_policy(version: Version, services: Here, _: Caller, how: Activation | None = None) -> Response:
    """Serve and pin this version, also if it failed before; a version whose files no longer exist gets 409.

    With `{"pin": false}` it is served until a newer version is published. For the newest version this means: follow
    the newest again. While an older version is pinned, that version samples all turns that the trainer trains on.
    """
    pin = (how or Activation()).pin

    def read() -> PolicyVersion:
        with services.database.read() as connection:
            return policies.get_policy(connection, version)

    def read_newest() -> list[PolicyVersion]:
        with services.database.read() as connection:
            return policies.list_policies(connection, limit=1000)[0]

    policy = await asyncio.to_thread(read)
    check = functools.partial(policies.check_files_exist, policy, read_newest)
    key = ("activate", str(version), policy.status.value, policy.path)
    await services.files.read(key, policy.path, check, seconds=CHECK_SECONDS)
    chosen = await services.writer.do(policies.choose_policy, version, pin=pin)
    (document,) = await policies_json([chosen], services.files)
    return answer(
        {
            **document,
            "is_served": chosen.status is PolicyStatus.ACTIVE,
            "pinned_version": version if pin else None,
        }
    )


async def _check_owner(services: Services, principal: Principal) -> None:
    """Check that the caller's tenant owns the model, which all tenants share.

    Raises:
        Forbidden: another tenant owns it, or several have keys and no setting says which of them does.
    """
    owner = services.settings.policy_tenant
    if owner is None:

        def read() -> set[str]:
            with services.database.read() as connection:
                return keys.tenants_with_keys(connection)

        if len(await asyncio.to_thread(read)) > 1:
            raise Forbidden(
                "Several tenants have keys and share this model. Set `policy_tenant` to the one that may change it."
            )
    elif owner != principal.tenant:
        raise Forbidden(f"The model belongs to tenant {owner!r}, not {principal.tenant!r}. Use one of its keys.")
