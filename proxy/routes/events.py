"""`GET /v1/events`: changes as server-sent events."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from proxy.http.connections import CLOSING
from proxy.routes.checked_route import CheckedRoute
from proxy.routes.serialise import Caller, Here
from proxy.services import Services
from turnwise.errors import ClientError, StoreError
from turnwise.json_text import dumps

router = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["operations"])

KEEP_ALIVE_SECONDS = 15.0
"""Longest time without a byte; then a comment is sent."""
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@router.get(
    "/events",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {"schema": {"type": "string"}}}}},
)
async def listen(
    request: Request,
    services: Here,
    principal: Caller,
) -> StreamingResponse:
    """Stream changes of this tenant's sessions and of versions and updates, as server-sent events.

    An event is `session`, `policy` or `update`, with the fields of the object that is new or has changed. A session has
    `session_id`, `task_id`, `group_id`, `status`, `num_turns`, `num_chains` and `num_rewards`, a policy `version` and
    `status`, an update `update_id` and `policy_version`. Changes of the 200 newest sessions are seen, within about a
    second. The event `lost` says that the client was too slow and events were dropped: read the lists again. The
    comment `: listening` says that changes from then on are sent, `: keep-alive` that none came for 15 s.
    """
    services.events.listeners.check(principal.tenant)
    return StreamingResponse(
        _stream(request, services, principal.tenant), media_type="text/event-stream", headers=HEADERS
    )


async def _stream(request: Request, services: Services, tenant: str) -> AsyncIterator[bytes]:
    comment, sent_at = b": listening\n\n", -math.inf
    async for found in services.events.changes(tenant, request.scope["extensions"][CLOSING]):
        part = b"".join(b"event: %s\ndata: %s\n\n" % (kind.encode(), dumps(data)) for kind, data in found)
        now = time.monotonic()
        if part or now - sent_at >= KEEP_ALIVE_SECONDS:
            try:
                with contextlib.suppress(StoreError):
                    await services.authenticator.authenticate(dict(request.scope["headers"]))
            except ClientError:  # the key has been revoked, or has expired
                return
            yield part or comment
            comment, sent_at = b": keep-alive\n\n", now
