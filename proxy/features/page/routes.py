"""Routes of the page and of lists for people: sessions, counts, updates, and changes as server-sent events."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse

from proxy.features.page import summaries, turns
from proxy.features.page.beside import Page
from proxy.features.page.summaries import Summary, UpdateSummary, summarise_sessions
from proxy.features.page.web import PageFiles
from proxy.features.session_filter import session_filter
from proxy.http.connections import CLOSING
from proxy.routes.control import (
    Caller,
    CheckedRoute,
    Here,
    Id,
    answer,
    describe_answer,
    page,
    record_json,
    sessions_json,
    with_columns,
)
from proxy.routes.declared import Routes
from proxy.services import Services
from turnwise.errors import ClientError, StoreError
from turnwise.features.page import overview, search, updates
from turnwise.json_text import dumps
from turnwise.store.database import Connection
from turnwise.store.selection import SessionFilter
from turnwise.types import Outcome, UpdateRecord

if TYPE_CHECKING:
    from proxy.routes.models import Answer

FiniteNumber = Annotated[float, Query(allow_inf_nan=False)]
files = PageFiles()
router = APIRouter(prefix="/v1", route_class=CheckedRoute)


def contents(
    min_reward: FiniteNumber | None = None,
    max_reward: FiniteNumber | None = None,
    termination_reason: Annotated[str | None, Query(max_length=1000)] = None,
    outcome: Annotated[Outcome | None, Query(description="Of a turn.")] = None,
    reason: Annotated[str | None, Query(max_length=1000, description="Of the turn's outcome.")] = None,
    policy_version: Annotated[
        int | None, Query(ge=0, le=2**31 - 1, description="A version that sampled in the turn.")
    ] = None,
    text: Annotated[Id | None, Query(description="Part of the turn's messages or reply.")] = None,
) -> search.Contents:
    return search.Contents(
        min_reward=min_reward,
        max_reward=max_reward,
        termination_reason=termination_reason,
        outcome=outcome,
        reason=reason,
        policy_version=policy_version,
        text=text,
    )


@router.get("/sessions", responses=describe_answer("SessionPage"), tags=["sessions"])
async def list_sessions(
    services: Here,
    wanted: Annotated[SessionFilter, Depends(session_filter)],
    held: Annotated[search.Contents, Depends(contents)],
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Id | None = None,
    summary: Annotated[bool, Query(description="Whether each session has a `summary` of what was said in it.")] = False,
) -> Response:
    """List this tenant's sessions, newest first.

    A page of several sessions ends at about 8 MiB, also before `limit`. The filters `min_reward` to `text` read what
    the sessions hold, without an index: one call looks at 2,000 sessions or for 2 seconds at most, and may return few
    or no sessions. `has_more` is true then; `after=` the answer's `next_after` continues. One turn must satisfy
    `outcome`, `reason`, `policy_version` and `text` together.
    """

    def read(connection: Connection) -> tuple[search.Found, Sequence[Summary]]:
        found = search.search_sessions(connection, wanted, held, limit=limit, after=after)
        return found, summarise_sessions(connection, found.sessions) if summary else ()

    async with contextlib.nullcontext() if held.is_empty else services.beside[Page].searches:
        found, summed_up = await services.database.fetch(read)
    rows = await sessions_json(found.sessions, services)
    for row, own in zip(rows, summed_up, strict=False):
        row["summary"] = own
    more = found.next_after is not None
    return page(rows, has_more=more, next_after=found.next_after, num_searched=found.num_searched)


@router.get("/counts", responses=describe_answer("CountsAnswer"), tags=["operations"])
async def counts(services: Here, principal: Caller) -> Response:
    """Count this tenant's sessions, turns and rewards, and the groups that wait for the trainer."""
    counted = await services.beside[Page].counts.read(principal.tenant)
    return answer({**dataclasses.asdict(counted.counts), "counted_at": counted.counted_at})


@router.get("/updates", responses=describe_answer("UpdatePage"), tags=["operations"])
async def list_updates(
    services: Here,
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> Response:
    """List the trainer's updates, newest first, each with this tenant's groups and sessions in it."""
    found, more = await services.database.fetch(updates.list_update_views, principal.tenant, limit=limit, after=after)
    names = services.pool.policy_names
    rows = [
        {
            **record_json(each.update),
            "policy": names.get(each.update.policy_id),
            "groups": each.groups,
            "sessions": each.sessions,
        }
        for each in found
    ]
    ids = [each.update.update_id for each in found]
    return page(await with_columns(rows, "update", ids, services, principal.tenant), has_more=more)


@router.get("/updates/summaries", responses=describe_answer("UpdateSummaries"), tags=["operations"])
async def summarise_updates(
    services: Here,
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> Response:
    """List the newest updates in a few numbers, oldest first, with this tenant's rewards and dropped groups."""
    found = await services.database.fetch(summaries.summarise_updates, principal.tenant, limit=limit)
    rows = [{name: getattr(each, name) for name in summaries.UpdateSummary.__slots__} for each in found]
    ids = [each.update_id for each in found]
    return page(await with_columns(rows, "update", ids, services, principal.tenant))


KEEP_ALIVE_SECONDS = 15.0
"""Longest time without a byte; then a comment is sent."""
HEADERS = {"cache-control": "no-store", "x-accel-buffering": "no"}


@router.get(
    "/events",
    response_class=StreamingResponse,
    tags=["operations"],
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
    services.beside[Page].events.listeners.check(principal.tenant)
    return StreamingResponse(
        _stream(request, services, principal.tenant), media_type="text/event-stream", headers=HEADERS
    )


async def _stream(request: Request, services: Services, tenant: str) -> AsyncIterator[bytes]:
    comment, sent_at = b": listening\n\n", -math.inf
    async for found in services.beside[Page].events.changes(tenant, request.scope["extensions"][CLOSING]):
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


def _answers() -> Iterable[type[Answer]]:
    from proxy.routes.models import answer_model, columns, field, model_of, page_model, session_model

    listed = session_model(
        "ListedSession",
        doc="One run of an agent in a list.",
        summary=field(model_of(Summary) | None, "What was said in it, with `summary=true`.", default=None),
    )
    viewed = answer_model(
        "UpdateAnswer",
        UpdateRecord,
        "What the trainer did with one batch.",
        policy=field(str | None, "The name of the policy that it trained."),
        groups=field(list[updates.UpdateGroup], "This tenant's groups in it, the dropped ones included."),
        sessions=field(list[updates.TrainedSession], "This tenant's sessions that it trained."),
        **columns("update"),
    )
    update = answer_model("ListedUpdate", UpdateSummary, **columns("update"))
    return (
        listed,
        page_model(
            "SessionPage",
            listed,
            "Some sessions.",
            next_after=field(str | None, "The `after` of the next page; null if there are no more sessions."),
            num_searched=field(int, "Number of sessions that were looked at for this page."),
        ),
        answer_model(
            "CountsAnswer",
            overview.Counts,
            "Counts of a tenant's rows in the store.",
            counted_at=field(
                datetime.datetime,
                "When everything but the trainers' reports was counted. For a tenant with more than 10,000 sessions "
                "and groups that is up to one second ago for every 10,000 of them.",
            ),
        ),
        viewed,
        page_model("UpdatePage", viewed, "Some updates."),
        update,
        page_model("UpdateSummaries", update, "Some updates in a few numbers."),
        answer_model("TokensAnswer", turns.TurnTokens),
        answer_model("RecomputedAnswer", turns.RecomputedLogprobs),
    )


router.include_router(turns.router)
ROUTES = Routes(
    router=router,
    actions={
        "GET /v1/sessions": "read",
        "GET /v1/turns/{turn_id}/tokens": "read",
        "GET /v1/turns/{turn_id}/logprobs": "examine",
        "GET /v1/images/{digest}": "read",
        "GET /v1/counts": "read",
        "GET /v1/events": "read",
        "GET /v1/updates": "read",
        "GET /v1/updates/summaries": "read",
    },
    answers=_answers,
    files={"/": files.index, "/web": files},
)
