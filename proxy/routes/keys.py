"""Routes of API keys.

A change takes effect in this process immediately.
"""

from __future__ import annotations

import datetime
from typing import Annotated

from fastapi import APIRouter, Response
from pydantic import Field

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
from turnwise.store import keys
from turnwise.types import DEFAULT_POLICY_NAME, utc_now

router = APIRouter(prefix="/v1/keys", route_class=CheckedRoute, tags=["keys"])


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
