"""Routes of policies and their versions: create, list, publish and archive.

A named policy belongs to a tenant, and for other tenants it does not exist. The default policy is shared by all, and
only its owner may change it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Path, Query, Request, Response
from pydantic import Field, model_validator

from proxy.auth import DEFAULT_TENANT, Principal
from proxy.features.policies.settings import PolicySettings
from proxy.reload.checkpoint import check_published
from proxy.reload.version_files import PATIENCE_SECONDS, VersionFiles
from proxy.routes.control import (
    Body,
    Caller,
    CheckedRoute,
    Count,
    Here,
    Text,
    answer,
    caller,
    describe_answer,
    is_operator,
    page,
    record_json,
    with_columns,
)
from proxy.routes.declared import Routes
from proxy.services import Services, services_of
from turnwise.errors import FilesNotRead, Forbidden, NotFound
from turnwise.features import policies as named_policies
from turnwise.features.earned import earned_by_version
from turnwise.features.untrained import trained_shares
from turnwise.store import policies, serving, statements, versions
from turnwise.store.database import Connection
from turnwise.types import DEFAULT_POLICY, DEFAULT_POLICY_NAME, Json, Policy, PolicyKind, PolicyVersion
from turnwise.version_directory import exist_on_disk

if TYPE_CHECKING:
    from proxy.routes.models import Answer

Version = Annotated[int, Path(ge=0, le=2**31 - 1)]
CHECK_SECONDS = 30.0
"""How long a request waits for a check of a version's files; a retry waits for the same check."""


class PolicyRoute(CheckedRoute):
    """A route of policies: a tenant may serve versions of its own policies, and the owner those of the default one."""

    async def authorise(self, request: Request) -> None:
        """Check the caller, and for the choice of a version its tenant."""
        principal, services = await caller(request), services_of(request)
        version: str | None = request.path_params.get("version")
        if version is None or not re.fullmatch(r"[0-9]{1,9}", version):
            return
        with contextlib.suppress(NotFound):
            if (await services.database.fetch(versions.get_version, int(version))).policy_id == DEFAULT_POLICY:
                await check_owner(services, principal)


router = APIRouter(prefix="/v1/policies", route_class=PolicyRoute, tags=["policies"])


class NewPolicy(Body):
    """A version to publish (`path`), or a policy to create (`name`, with `path` if it starts from an adapter)."""

    version: Count | None = None
    """Number of the version; by default one more than the highest of all policies."""
    path: str | None = Field(default=None, min_length=1, max_length=4096, pattern=r"^[^\x00]*$")
    kind: PolicyKind = PolicyKind.FULL
    metrics: dict[str, Any] = Field(default_factory=dict)
    policy: Text = DEFAULT_POLICY_NAME
    """The policy that the version is of."""
    name: Text | None = None
    """Name of a policy to create, unique within the tenant."""
    base: Text = DEFAULT_POLICY_NAME
    """What a policy to create starts from: `default`, which is the engine's own model, or an adapter as
    `POLICY@VERSION`. Leave it out with `path`, the directory of an adapter that PEFT wrote."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> NewPolicy:
        if self.path is None and self.name is None:
            raise ValueError("give `path` to publish a version, or `name` to create a policy")
        if self.path is not None and self.base != DEFAULT_POLICY_NAME:
            raise ValueError("give `path` or `base`: a policy starts from one of both")
        return self


@router.get("", responses=describe_answer("PolicyPage"))
async def list_policies(
    services: Here,
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
    policy: Annotated[Text | None, Query(description="Only versions of this policy.")] = None,
    summary: Annotated[bool, Query(description="Whether each policy has a `summary` of what it holds.")] = False,
    earned: Annotated[bool, Query(description="Whether each version has what its sessions `earned`.")] = False,
) -> Response:
    """List the policies, and their versions, newest first: the tenant's own ones and the default one.

    Only keys that may publish a directory see the default policy's directories; for others `path` is null.
    """

    def read(connection: Connection) -> tuple[list[Policy], list[PolicyVersion], bool, int | None]:
        named = policies.list_policies(connection, principal.tenant)
        chosen = policies.find_policy(connection, principal.tenant, policy or DEFAULT_POLICY_NAME)
        wanted = {each.policy_id for each in named} if policy is None else {chosen.policy_id}
        found, more = versions.list_versions(
            connection, limit=limit, after=after, max_bytes=statements.PAGE_BYTES, policy_ids=wanted
        )
        states = serving.serving_states(connection, [each.policy_id for each in named])
        pinned = {number: state.pinned_version for number, state in states.items()}
        listed = [dataclasses.replace(each, pinned_version=pinned.get(each.policy_id)) for each in named]
        return listed, found, more, pinned.get(chosen.policy_id)

    named, found, more, pinned = await services.database.fetch(read)
    listed = await policies_json(found, services.files, {each.policy_id: each.name for each in named})
    if not await is_operator(services, principal):
        shared = {each.version for each in found if each.policy_id == DEFAULT_POLICY}
        listed = [{**each, "path": None} if each["version"] in shared else each for each in listed]
    if earned:
        of_version = await services.database.fetch(
            earned_by_version, principal.tenant, {each.policy_id for each in named}
        )
        listed = [{**each, "earned": of_version.get(each["version"])} for each in listed]
    held = await _summaries(services, principal, named) if summary else {}
    rows = [record_json(each) | ({"summary": held[each.policy_id]} if summary else {}) for each in named]
    own = next((each.name for each in named if each.policy_id == principal.policy_id), DEFAULT_POLICY_NAME)
    shares = await services.database.fetch(trained_shares, principal.tenant) if summary else []
    return page(listed, has_more=more, pinned_version=pinned, key_policy=own, policies=rows, trained_shares=shares)


async def _summaries(services: Services, principal: Principal, named: list[Policy]) -> dict[int, Json]:
    """Return what policies hold, by their numbers; `num_bytes` is null where the file system does not answer."""

    def read(
        connection: Connection,
    ) -> tuple[dict[int, named_policies.PolicySummary], dict[int, list[PolicyVersion]]]:
        held = named_policies.summarise_policies(connection, principal.tenant)
        return held, {number: named_policies.measured_versions(connection, number) for number in held}

    held, of_policies = await services.database.fetch(read)
    measure = functools.partial(named_policies.sizes_on_disk, of_policies)
    sizes: dict[int, int | None] = {}
    with contextlib.suppress(FilesNotRead):
        key = ("sizes", *(str(each.policy_id) for each in named))
        sizes = await services.files.read(key, "the versions", measure, seconds=PATIENCE_SECONDS)
    rows = [dataclasses.asdict(each) | {"num_bytes": sizes.get(number)} for number, each in held.items()]
    return dict(zip(held, await with_columns(rows, "policy", list(held), services, principal.tenant), strict=True))


@router.post("", responses=describe_answer("PolicyAnswer", "NamedPolicy"))
async def publish_policy(wanted: NewPolicy, services: Here, principal: Caller) -> Response:
    """Publish a directory of weights as the next version of a policy; engines load it once it has been checked.

    With `name`, create a policy of the caller's tenant; with `path` too, it starts from this adapter. All tenants share
    the default policy, so only keys of its owner may publish its versions: the tenant `policy_tenant`, by default
    `default`, or the only tenant with keys or policies. A directory may hold the weights of any tenant, so keys of
    other tenants get 403 for a `path`, also for their own policies.
    """
    if wanted.name is not None:
        if wanted.path is not None:
            await _check_directory(services, principal, wanted.path, PolicyKind.LORA, is_start=True)
        created, _ = await services.writer.do(
            named_policies.create_policy,
            principal.tenant,
            wanted.name,
            wanted.base,
            adapter=wanted.path,
            max_policies=_max_policies(services),
        )
        await services.pool.refresh()
        return answer(record_json(created))
    policy = await services.database.fetch(policies.find_policy, principal.tenant, wanted.policy)
    if policy.policy_id == DEFAULT_POLICY:
        await check_owner(services, principal)
    assert wanted.path is not None
    await _check_directory(services, principal, wanted.path, wanted.kind)
    published = await services.writer.do(
        named_policies.publish_next,
        wanted.path,
        wanted.kind,
        metrics=wanted.metrics,
        version=wanted.version,
        policy_id=policy.policy_id,
    )
    (document,) = await policies_json([published], services.files, {policy.policy_id: policy.name})
    return answer(document)


async def _check_directory(
    services: Services, principal: Principal, path: str, kind: PolicyKind, *, is_start: bool = False
) -> None:
    """Check that the caller may publish a directory of weights, and that it fits the served model or a new policy."""
    if not await is_operator(services, principal):
        raise Forbidden(
            "Only the operator's keys may publish a directory, which may hold another tenant's weights. This key is of "
            f"tenant {principal.tenant!r}. Create the policy from a `base`, such as `default` or `POLICY@VERSION`, or "
            "let the operator import the directory: turnwise policies create NAME --tenant TENANT --adapter DIRECTORY",
            code="path_not_allowed",
        )
    model_path = next((engine.model_path for engine in services.pool.serving), None)
    check = functools.partial(check_published, path, kind, model_path, is_start=is_start)
    key = ("start" if is_start else "publish", path, kind, str(model_path))
    await services.files.read(key, path, check, seconds=CHECK_SECONDS)


def _max_policies(services: Services) -> int | None:
    assert isinstance(services.settings, PolicySettings)
    return services.settings.tenant_max_policies


async def check_owner(services: Services, principal: Principal) -> None:
    if not await is_operator(services, principal):
        owner = services.settings.policy_tenant or DEFAULT_TENANT
        raise Forbidden(
            f"The model belongs to tenant {owner!r}, not {principal.tenant!r}. Use one of its keys, or set the proxy's "
            "`policy_tenant`."
        )


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
        named_policies.archive_policy,
        principal.tenant,
        policy,
        is_archived=(how or Archival()).archived,
        max_policies=_max_policies(services),
    )
    await services.pool.refresh()
    return answer(record_json(archived))


async def policies_json(found: Sequence[PolicyVersion], files: VersionFiles, names: Mapping[int, str]) -> list[Json]:
    """Return policy versions as the API's JSON, with policies' names by number.

    `on_disk` is null where the file system, which `files` reads, does not answer.
    """
    by_directory: dict[pathlib.Path, list[PolicyVersion]] = {}
    for policy in found:
        by_directory.setdefault(pathlib.Path(policy.path).parent, []).append(policy)
    exist: dict[int, bool | None] = {}
    for each in await asyncio.gather(*(_on_disk(parent, group, files) for parent, group in by_directory.items())):
        exist |= each
    return [
        {**record_json(policy), "policy": names[policy.policy_id], "on_disk": exist.get(policy.version)}
        for policy in found
    ]


async def _on_disk(parent: pathlib.Path, found: list[PolicyVersion], files: VersionFiles) -> dict[int, bool | None]:
    """Return whether the files of versions in one directory exist; not all of them if the file system does not answer.

    Requests share a read that goes on, which may be of other versions: the missing ones are read after it.
    """
    read = functools.partial(exist_on_disk, found)
    exist: dict[int, bool | None] = {}
    with contextlib.suppress(FilesNotRead):
        while any(policy.version not in exist for policy in found):
            exist |= await files.read(("on disk", str(parent)), str(parent), read, seconds=PATIENCE_SECONDS)
    return exist


def _answers() -> Iterable[type[Answer]]:
    from proxy.features.policies import answers

    return answers.NamedPolicy, answers.PolicyAnswer, answers.PolicyPage


ROUTES = Routes(
    router=router,
    actions={
        "GET /v1/policies": "read",
        "POST /v1/policies": "publish",
        "POST /v1/policies/{policy}/archive": "activate",
    },
    answers=_answers,
)
