"""Routes by which a trainer that is not ours, on any machine, claims groups, reads their chains and acknowledges them.

A claim holds groups of the caller's tenant alone, under the same leases and fencing tokens as our own trainer's, which
must not run beside them. Every request may be repeated: `Idempotency-Key` names a claim.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import APIRouter, Header, Response
from pydantic import Field, StrictBool

from proxy.routes.control import (
    Body,
    Caller,
    CheckedRoute,
    Count,
    Here,
    Id,
    Number,
    Text,
    answer,
    describe_answer,
    is_operator,
    record_json,
)
from proxy.routes.declared import Routes
from proxy.services import Services
from proxy.settings import ProxySettings
from turnwise.errors import Forbidden
from turnwise.features import advantages, remote_claims
from turnwise.features.exports import experience_json
from turnwise.features.remote_claims import Held, Work
from turnwise.json_text import dumps
from turnwise.store import claims, experiences, policies
from turnwise.store.database import Connection
from turnwise.types import DEFAULT_POLICY, DEFAULT_POLICY_NAME, Policy

if TYPE_CHECKING:
    from proxy.auth import Principal
    from proxy.routes.models import Answer

MOST_GROUPS = 1024
MOST_BYTES, MOST_STRINGS = 16 * 2**20, 200_000
LEASE_SECONDS = 60.0


class ClaimRoute(CheckedRoute):
    """A route whose body may name every turn of a batch."""

    def limits(self, settings: ProxySettings) -> tuple[int, int]:
        return min(settings.max_body_bytes, MOST_BYTES), MOST_STRINGS


router = APIRouter(prefix="/v1/claims", route_class=ClaimRoute, tags=["rewards"])
Lease = Annotated[Number, Field(gt=0.0, le=claims.LONGEST_LEASE_SECONDS)]


class NewClaim(Body):
    """What to claim."""

    trainer_id: Id
    """The trainer's name; it is recorded with its updates."""
    policy: Text = DEFAULT_POLICY_NAME
    max_groups: Annotated[int, Field(strict=True, ge=1, le=MOST_GROUPS)] = 8
    singles_per_group: Annotated[int, Field(strict=True, ge=1, le=MOST_GROUPS)] = 1
    """How many single sessions count as one group."""
    lease_seconds: Lease = LEASE_SECONDS
    """How long the groups are held; a renewal extends it."""


class HeldGroup(Body):
    """One group of a claim."""

    group: Count
    group_id: Id
    fencing_token: Count
    is_single: StrictBool = False
    """Not read: the groups of a claim can be sent back as they came."""


class HeldGroups(Body):
    """The groups of a claim, or some of them, as its answer names them."""

    groups: Annotated[list[HeldGroup], Field(min_length=1, max_length=MOST_GROUPS**2)]

    @property
    def held(self) -> list[Held]:
        return [Held(**each.model_dump(exclude={"is_single"})) for each in self.groups]


class Renewal(HeldGroups):
    """A claim to hold for longer."""

    lease_seconds: Lease = LEASE_SECONDS


class Release(HeldGroups):
    """A claim to give back."""

    reason: Text = "released"


class Done(HeldGroups):
    """An update to record."""

    trainer_id: Id
    policy_version: Count
    """The version that the update made, which `POST /v1/policies` has published."""
    trained: dict[Id, Number]
    """The advantage of each turn that was trained, by its id."""
    refused: dict[Id, Text] = Field(default_factory=dict)
    """The reason for each group that was not trained, by its id; it is never claimed again."""
    metrics: dict[str, Any] = Field(default_factory=dict)


@dataclasses.dataclass(slots=True)
class ClaimedGroup:
    """A group that is held."""

    group: int
    """Its number in the store, which the requests about this claim repeat."""
    group_id: str
    fencing_token: int
    """Increases by one with each holder: an update under an older one is refused."""
    is_single: bool
    """Whether it is one session that is compared with no other: `advantage` of its chains is null."""


@router.post("", responses=describe_answer("ClaimAnswer"))
async def claim_groups(
    wanted: NewClaim,
    services: Here,
    principal: Caller,
    idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
) -> Response:
    """Claim finished, rewarded groups of the caller's tenant, and return their chains as `GET /v1/experiences` does.

    A claim without a group has empty lists: ask again later. `advantage` has one value a turn, that of `grpo`. The
    chains have `loss_mask` and `logprobs` after the prompt, with the versions that sampled them. Renew the lease while
    you train, then acknowledge the groups with the version that you published, or release them. While one of our own
    trainers runs on the database this gets 409.
    """
    policy = await _own_policy(services, principal, wanted.policy)
    claim = await services.writer.do(
        remote_claims.take,
        principal.tenant,
        wanted.trainer_id,
        idempotency_key or uuid.uuid4().hex,
        policy.policy_id,
        max_groups=wanted.max_groups,
        singles_per_group=wanted.singles_per_group,
        lease_seconds=wanted.lease_seconds,
    )
    held = [] if claim is None else claim.groups
    rows = [ClaimedGroup(each.group_pk, each.group_id, each.fencing_token, each.is_single) for each in held]

    def read(connection: Connection) -> bytes:
        pks = [each.group_pk for each in held]
        shape = dataclasses.replace(experiences.CLAIMED, policy_id=policy.policy_id)
        found = [*experiences.experiences_of_groups(connection, pks, shape)]
        named = (dataclasses.replace(each, policy=policy.name) for each in advantages.in_groups(found))
        return b",".join([dumps(experience_json(each)) for each in named])

    chains = await services.database.fetch(read) if held else b""
    head = dumps({"object": "claim", "policy": policy.name, "groups": [dataclasses.asdict(each) for each in rows]})
    return Response(b'%b,"chains":[%b]}' % (head[:-1], chains), media_type="application/json")


@router.post("/renew", responses=describe_answer("RenewedAnswer"))
async def renew_claim(wanted: Renewal, services: Here, principal: Caller) -> Response:
    """Hold the groups for longer; 409 where another trainer has one of them by now.

    `denied` are sessions of these groups that were marked as not to be trained, also since they were read: leave them
    out. `deleted` are groups that were deleted.
    """
    renewed = await services.writer.do(remote_claims.renew, principal.tenant, wanted.held, wanted.lease_seconds)
    return answer(renewed)


@router.post("/release", responses=describe_answer("ReleasedAnswer"))
async def release_claim(wanted: Release, services: Here, principal: Caller) -> Response:
    """Give the groups back, to be claimed again; 409 where another trainer has one of them by now."""
    await services.writer.do(remote_claims.release, principal.tenant, wanted.held, wanted.reason)
    return answer({"num_groups": len(wanted.groups)})


@router.post("/ack", responses=describe_answer("RecordedUpdate"))
async def acknowledge_claim(done: Done, services: Here, principal: Caller) -> Response:
    """Record that the groups were trained, once, and which version the update made; return the update.

    A repeated request returns the same update. 409 where another trainer has one of the groups by now: nothing is
    recorded then, and the version that was published should be activated by nobody.
    """
    work = Work(
        trainer_id=done.trainer_id,
        policy_version=done.policy_version,
        trained=done.trained,
        refused=done.refused,
        metrics=done.metrics,
    )
    return answer(record_json(await services.writer.do(remote_claims.ack, principal.tenant, done.held, work)))


async def _own_policy(services: Services, principal: Principal, name: str) -> Policy:
    policy = await services.database.fetch(policies.find_policy, principal.tenant, name)
    if policy.policy_id == DEFAULT_POLICY and not await is_operator(services, principal):
        raise Forbidden(
            f"Only the operator's keys may train the default policy, and this key is of tenant {principal.tenant!r}: "
            "name one of its own policies as `policy`."
        )
    return policy


def _answers() -> Iterable[type[Answer]]:
    from proxy.routes.models import Answer as Base
    from proxy.routes.models import answer_model, create, field
    from turnwise.types import UpdateRecord

    claim = create(
        "ClaimAnswer",
        Base,
        "Groups that a trainer holds, and their chains.",
        {
            "object": field(str, "Always `claim`."),
            "policy": field(str, "The policy that they are claimed for."),
            "groups": field(list[ClaimedGroup], "The groups, oldest first; empty where none is ready."),
            "chains": (list[dict[str, Any]], Field(description="Their chains, as `GET /v1/experiences` returns them.")),
        },
    )
    released = create("ReleasedAnswer", Base, "What was given back.", {"num_groups": field(int, "How many groups.")})
    return (
        claim,
        answer_model("RenewedAnswer", remote_claims.Renewed),
        released,
        answer_model("RecordedUpdate", UpdateRecord),
    )


ROUTES = Routes(
    router=router,
    actions={
        "POST /v1/claims": "publish",
        "POST /v1/claims/renew": "publish",
        "POST /v1/claims/release": "publish",
        "POST /v1/claims/ack": "publish",
    },
    answers=_answers,
)
