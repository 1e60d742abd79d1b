"""Routes of API keys, and of the marks that end users, keys and tenants are not trained.

A change takes effect in this process immediately.
"""

from __future__ import annotations

import dataclasses
import datetime
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Response
from pydantic import Field, StrictBool, model_validator

from proxy.routes.control import (
    Body,
    Caller,
    CheckedRoute,
    Here,
    Id,
    Text,
    answer,
    describe_answer,
    page,
    record_json,
    with_columns,
)
from proxy.sessions.identities import MAX_USER_ID, next_prefix
from turnwise.store import consent, keys
from turnwise.types import DEFAULT_POLICY_NAME, ConsentMark, ConsentOf, utc_now

router = APIRouter(prefix="/v1/keys", route_class=CheckedRoute, tags=["keys"])
consents = APIRouter(prefix="/v1/consent", route_class=CheckedRoute, tags=["sessions"])


class NewKey(Body):
    """The fields of a new key."""

    role: keys.KeyRole = keys.KeyRole.AGENT
    name: Text = ""
    expires_in_seconds: Annotated[int, Field(strict=True, ge=1, le=10**9)] | None = None
    """Lifetime of the key; by default it is valid until it is revoked."""
    token_budget: Annotated[int, Field(strict=True, ge=1, le=2**63 - 1)] | None = None
    """Prompt and sampled tokens that its calls may use; by default the proxy's `key_token_budget`."""
    policy: Text = DEFAULT_POLICY_NAME
    """The policy of the tenant that its sessions sample with."""


@router.get("", responses=describe_answer("KeyList"))
async def list_keys(services: Here, principal: Caller) -> Response:
    """List the tenant's keys without their secrets, including revoked and expired ones, oldest first."""
    rows = [record_json(key) for key in await services.database.fetch(keys.list_keys, principal.tenant)]
    return page(await with_columns(rows, "key", [row["key_id"] for row in rows], services, principal.tenant))


@router.post("", responses=describe_answer("NewKeyAnswer"))
async def create_key(services: Here, principal: Caller, wanted: NewKey) -> Response:
    """Create a key of the caller's tenant. After the first key, the proxy rejects callers without a key."""
    lifetime = wanted.expires_in_seconds
    expires_at = None if lifetime is None else utc_now() + datetime.timedelta(seconds=lifetime)
    key_id, secret = await services.writer.do(
        keys.create_key,
        principal.tenant,
        wanted.role,
        wanted.name,
        expires_at=expires_at,
        token_budget=wanted.token_budget,
        policy=wanted.policy,
    )
    services.forget_keys()
    return answer({**record_json(await services.database.fetch(keys.get_key, key_id)), "key": secret})


@router.post("/{key_id}/revoke", responses=describe_answer("KeyAnswer"))
async def revoke_key(key_id: Id, services: Here, principal: Caller) -> Response:
    """Revoke a key of the caller's tenant; revoking it again changes nothing."""
    revoked = await services.writer.do(keys.revoke_key, key_id, tenant=principal.tenant)
    services.forget_keys()
    return answer(record_json(revoked))


class NewConsent(Body):
    """Whose calls are not trained, or are trained again."""

    kind: Literal["session", "user", "key", "tenant"]
    name: Annotated[str, Field(max_length=MAX_USER_ID)] = ""
    """The id of the session, the end user or the key; empty for the caller's tenant."""
    train: StrictBool = False
    """True removes a mark: sessions that are created from now on are trained. A session that is marked stays so."""
    record: StrictBool = True
    """False: nothing is stored either of what is said from now on."""

    @model_validator(mode="after")
    def _names_what_it_marks(self) -> NewConsent:
        if (self.kind == "tenant") == bool(self.name):
            raise ValueError("`name` is the id of the session, user or key; leave it out for kind `tenant`")
        if self.train and (self.kind == "session" or not self.record):
            raise ValueError("a marked session stays so, and what is not recorded is not trained")
        return self


@dataclasses.dataclass(slots=True)
class Consent:
    """What a mark has changed."""

    kind: str
    name: str
    train: bool
    record: bool
    num_sessions: int
    """Sessions that were marked, copies of their turns in other sessions included."""


@consents.get("", responses=describe_answer("ConsentList"))
async def list_consent(
    services: Here,
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str | None, Query(description="`KIND:NAME` of the last mark of the page before.")] = None,
) -> Response:
    """List the marks of end users, keys and the tenant; the sessions are those of `GET /v1/sessions?train=false`."""
    kind, _, name = (after or "").partition(":")
    before = None if after is None else (kind, name)
    found, more = await services.database.fetch(consent.list_marks, principal.tenant, limit=limit, after=before)
    return page(found, has_more=more)


@consents.post("", responses=describe_answer("ConsentAnswer"))
async def change_consent(services: Here, principal: Caller, wanted: NewConsent) -> Response:
    """Mark a session, an end user, a key or the tenant as not to be trained, its sessions until now included.

    What a trainer has trained stays trained. Keys and tenants are marked, and marks removed, by an admin key.
    """
    if wanted.train or wanted.kind in ("key", "tenant"):
        principal.require("keys")
    tenant, number = principal.tenant, 0
    if wanted.kind == "session":
        of = tenant, wanted.name, next_prefix(wanted.name), wanted.record
        number = await services.restrict(consent.restrict_session, *of)
    else:
        if wanted.kind == "key":
            await services.database.fetch(keys.get_key, wanted.name, tenant)
        kind = ConsentOf(wanted.kind)
        mark = ConsentMark(
            tenant=tenant, kind=kind, name=wanted.name, record=wanted.record, written_by=principal.key_id
        )
        await services.writer.do(consent.lift_mark if wanted.train else consent.put_mark, mark)
        services.forget_keys()
        number = 0 if wanted.train else await services.restrict(consent.restrict_marked, mark)
    return answer(Consent(wanted.kind, wanted.name, wanted.train, wanted.record, number))
