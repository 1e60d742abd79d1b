"""Routes for operators: liveness, readiness, counts, updates and metrics."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import datetime
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse

from proxy.auth import Principal
from proxy.routes.checked_route import CheckedRoute
from proxy.routes.models import Answer, Page, UpdatePage, answer, describe_answer
from proxy.routes.openapi import describe
from proxy.routes.serialise import caller, page, update_json
from proxy.services import Services, services_of
from proxy.writer.client import ANSWER_SECONDS
from turnwise import installation
from turnwise.errors import ClientError, StoreError
from turnwise.store import queries, trained, update_summaries
from turnwise.store.trainer_status import TrainerState, TrainerStatus, trainer_statuses
from turnwise.store.update_summaries import UpdateSummary
from turnwise.types import Json

router = APIRouter(tags=["operations"])
log = logging.getLogger(__name__)

control = APIRouter(prefix="/v1", route_class=CheckedRoute, tags=["operations"])
HIDDEN_ERROR = "the last reload failed; present an API key to read the error"

Caller = Annotated[Principal, Depends(caller)]


class EngineReport(Answer):
    """The proxy's state of one engine."""

    url: str | None
    """None for callers without a key."""
    ready: bool
    model: str
    policy_version: int
    error: str | None
    """Why it gets no calls, as the last check found; null while it serves, and for callers without a key."""


class TrainerReport(Answer):
    """The last report of a trainer."""

    trainer_id: str
    text: str
    """One line, such as `4 of 32 groups are ready`; its error if it died."""
    state: TrainerState
    """`running` or `stopped`; `blocked` after several versions that engines refused, `died` with an error, or `silent`
    without a sign of life for a minute."""
    starts_at: datetime.datetime | None
    """When the next batch starts even if it is not full; null if the trainer waits for more groups or trains."""
    reported_at: datetime.datetime


class CountsAnswer(Answer):
    """Counts of a tenant's rows in the store."""

    sessions: dict[str, int]
    """By status."""
    groups: dict[str, int]
    """Number of groups by status: `ready` groups wait for the trainer, `claimed` groups are being trained."""
    num_turns: int
    num_rewards: int
    num_failed_calls: int
    """Calls of the last hour that ended with an error."""
    num_updates: int
    """Number of updates of the policy, which all tenants share."""
    trainers: list[TrainerReport]
    """The last report of each trainer, newest first."""
    counted_at: datetime.datetime
    """When everything but the trainers' reports was counted. For a tenant with more than 10,000 sessions and groups,
    that is up to one second ago for every 10,000 of them."""


class Spending(Answer):
    """The tokens of one budget."""

    token_budget: int | None
    """Prompt and sampled tokens; null for no budget."""
    tokens_used: int
    """Counted while any budget is set."""


class BudgetAnswer(Answer):
    """The token budgets that the caller's calls are charged to."""

    key: Spending
    tenant: Spending
    days: int | None
    """Period of both budgets in UTC days, today included; null for budgets that are never renewed."""


class UpdateSummaries(Page):
    """Some updates in a few numbers."""

    data: list[UpdateSummary]
    has_more: bool


class DoctorAnswer(Page):
    """The findings about this installation."""

    data: list[installation.Finding]
    has_more: bool


class TrainerSummary(Answer):
    """Whether a trainer trains."""

    trainer_id: str
    state: TrainerState
    text: str | None
    """Its last report; null for callers without a key."""


class ReadyAnswer(Answer):
    """Whether the proxy can serve calls."""

    ready: bool
    """Calls are served without a trainer too, so a dead one does not change this."""
    engines: list[EngineReport]
    store: str
    """`ok`, or the error."""
    policy_version: int | None
    exact_continuation: bool
    reload_error: str | None
    trainers: list[TrainerSummary]


@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """Report that the process runs."""
    return "ok"


@router.get("/readyz", responses={200: {"model": ReadyAnswer}, 503: {"model": ReadyAnswer}})
async def readyz(request: Request, services: Annotated[Services, Depends(services_of)]) -> Response:
    """Report whether calls can be served: an engine serves the active version, and the store answers."""
    is_known = await _may_see_addresses(request, services)
    engines = [
        {
            "url": engine.url if is_known else None,
            "ready": engine.is_serving,
            "model": engine.model,
            "policy_version": engine.version,
            "error": engine.problem if is_known and not engine.is_serving else None,
        }
        for engine in services.pool.engines
    ]
    store_error, trainers = await _read_store(services)
    ready = store_error is None and bool(services.pool.serving)
    report: dict[str, Any] = {
        "ready": ready,
        "engines": engines,
        "store": store_error or "ok",
        "policy_version": max((engine.version for engine in services.pool.serving), default=None),
        "exact_continuation": services.sessions.template is not None and services.settings.continuation,
        "reload_error": services.reloader.problem if is_known else services.reloader.problem and HIDDEN_ERROR,
        "trainers": [
            {"trainer_id": each.trainer_id, "state": each.state, "text": each.text if is_known else None}
            for each in trainers
        ],
    }
    return JSONResponse(report, status_code=200 if ready else 503)


async def _may_see_addresses(request: Request, services: Services) -> bool:
    """Return whether the caller presents a valid API key; a session key is in the hands of an agent."""
    try:
        principal = await services.authenticator.authenticate(dict(request.scope["headers"]))
    except (ClientError, StoreError):
        return False
    return principal.session_id is None


async def _read_store(services: Services) -> tuple[str | None, list[TrainerStatus]]:
    """Return why the store cannot be read or written, None if both work, and what the trainers report."""

    def read() -> list[TrainerStatus]:
        with services.database.read() as connection:
            return trainer_statuses(connection)

    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            trainers = await asyncio.to_thread(read)
        await services.writer.check()
    except TimeoutError:
        return f"the database has not answered for {ANSWER_SECONDS:g} s; check that it runs", []
    except StoreError as error:
        return str(error), []
    return None, trainers


@control.get("/counts", responses=describe_answer(CountsAnswer))
async def counts(services: Annotated[Services, Depends(services_of)], principal: Caller) -> Response:
    """Count this tenant's sessions, turns and rewards, and the groups that wait for the trainer."""
    counted = await services.counts.read(principal.tenant)
    return answer({**dataclasses.asdict(counted.counts), "counted_at": counted.counted_at})


@control.get("/budget", responses=describe_answer(BudgetAnswer))
async def budget(services: Annotated[Services, Depends(services_of)], principal: Caller) -> Response:
    """Return the token budgets of the caller's key and tenant, and what is used of them."""
    key, tenant = [
        {"token_budget": account.budget, "tokens_used": account.num_tokens}
        for account in await services.budgets.accounts(principal)
    ]
    return answer({"key": key, "tenant": tenant, "days": services.budgets.days})


@control.get("/updates", responses=describe_answer(UpdatePage))
async def list_updates(
    services: Annotated[Services, Depends(services_of)],
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[int | None, Query(ge=0, le=2**31 - 1)] = None,
) -> Response:
    """List the trainer's updates, newest first, each with this tenant's groups and sessions in it."""

    def read() -> Json:
        with services.database.read() as connection:
            found, more = trained.list_updates(connection, principal.tenant, limit=limit, after=after)
            return page([update_json(view) for view in found], more)

    return answer(await asyncio.to_thread(read))


@control.get("/updates/summaries", responses=describe_answer(UpdateSummaries))
async def summarise_updates(
    services: Annotated[Services, Depends(services_of)],
    principal: Caller,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> Response:
    """List the newest updates in a few numbers, oldest first, with this tenant's rewards and dropped groups."""

    def read() -> Json:
        with services.database.read() as connection:
            found = update_summaries.summarise_updates(connection, principal.tenant, limit=limit)
            return page([dataclasses.asdict(each) for each in found], has_more=False)

    return answer(await asyncio.to_thread(read))


@control.get("/doctor", responses=describe_answer(DoctorAnswer))
async def examine(services: Annotated[Services, Depends(services_of)], _: Caller) -> Response:
    """Examine engines and database as `turnwise doctor` does; each engine gets a few calls of one token."""
    settings = services.settings
    engines, database = [engine.url for engine in services.pool.engines], settings.database.get_secret_value()
    found = await asyncio.to_thread(lambda: list(installation.examine_running(engines, database)))
    return answer(page([dataclasses.asdict(each) for each in found], has_more=False))


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request, _: Caller) -> Response:
    """Return the OpenAPI document."""
    return answer(describe(request.app))


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, _: Caller) -> Response:
    """Return all metrics in Prometheus' text format, summed over the workers of this proxy."""
    services = services_of(request)
    try:
        await asyncio.to_thread(_read_gauges, services)
    except StoreError as error:
        services.metrics.background_errors.labels("gauges").inc()
        log.warning("the gauges that come from the store could not be read: %s", error)
    rendered = await asyncio.to_thread(services.metrics.render)
    return Response(rendered, media_type="text/plain; version=0.0.4")


def _read_gauges(services: Services) -> None:
    """Set the gauges that come from the store."""
    with services.database.read() as connection:
        unfinished = queries.unfinished_groups(connection)
        update = queries.last_update(connection)
        trainers = collections.Counter(each.state for each in trainer_statuses(connection))
    for state in TrainerState:
        services.metrics.trainers.labels(state.value).set(trainers[state])
    for status, count in unfinished.items():
        services.metrics.groups.labels(status).set(count)
    if update is not None:
        services.metrics.last_update.set(update.update_id)
        services.metrics.last_update_timestamp.set(update.created_at.timestamp())
        reward = update.metrics.get("reward_mean")
        if reward is not None:
            services.metrics.last_update_reward.set(reward)
