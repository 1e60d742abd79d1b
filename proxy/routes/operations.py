"""Routes for operators: liveness, readiness and metrics."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
from collections.abc import Mapping

from fastapi import APIRouter, Request, Response
from fastapi.responses import PlainTextResponse

from proxy.auth import ACTION_OF_ROUTE
from proxy.metrics import STORED
from proxy.routes.control import Here, answer, caller, describe_answer, is_operator
from proxy.services import Services
from proxy.writer.client import ANSWER_SECONDS
from turnwise.errors import ClientError, StoreError, StoreUnavailable
from turnwise.store import groups, trainer_reports, updates
from turnwise.store.database import Connection

router = APIRouter(tags=["operations"])

log = logging.getLogger(__name__)

OF_TENANTS = (b"turnwise_named_policy_version{", b"turnwise_trained_share{")
StoredGauge = tuple[str, str, str]
"""Name of a gauge, and its label's name and value, empty where it has none."""
NO_ANSWER = f"the database has not answered for {ANSWER_SECONDS:g} s; check that it runs"
HIDDEN_ERROR = "present an API key to read the error"


@dataclasses.dataclass(slots=True, kw_only=True)
class EngineReport:
    """The proxy's state of one engine."""

    url: str | None
    """None for callers without a key."""
    ready: bool
    model: str
    policy_version: int
    error: str | None
    """Why it gets no calls, as the last check found; null while it serves, and for callers without a key."""


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainerSummary:
    """Whether a trainer trains."""

    trainer_id: str
    state: trainer_reports.TrainerState
    text: str | None
    """Its last report; null for callers without a key."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Readiness:
    """Whether the proxy can serve calls."""

    ready: bool
    """Calls are served without a trainer too, so a dead one does not change this."""
    engines: list[EngineReport]
    store: str
    """`ok`, or the error."""
    policy_version: int | None
    exact_continuation: bool
    engines_error: str | None
    """Why it cannot be read which engines there are, so that the list may be old."""
    reload_error: str | None
    trainers: list[TrainerSummary]


@router.get("/healthz", response_class=PlainTextResponse)
async def healthz() -> str:
    """Report that the process runs."""
    return "ok"


@router.get("/readyz", responses={status: describe_answer("ReadyAnswer")[200] for status in (200, 503)})
async def readyz(request: Request, services: Here) -> Response:
    """Report whether calls can be served: an engine serves the active version, and the store answers."""
    tenant = await _known_tenant(request, services)
    is_known = tenant is not None
    engines = [
        EngineReport(
            url=engine.url if is_known else None,
            ready=engine.is_serving,
            model=engine.model,
            policy_version=services.pool.version_on(engine),
            error=engine.problem if is_known and not engine.is_serving else None,
        )
        for engine in services.pool.engines
    ]
    store_error, trainers, shown = await _read_store(services, tenant)
    ready = store_error is None and bool(services.pool.serving)
    report = Readiness(
        ready=ready,
        engines=engines,
        store=store_error or "ok",
        policy_version=max(map(services.pool.version_on, services.pool.serving), default=None),
        exact_continuation=services.sessions.template is not None and services.settings.continuation,
        engines_error=services.pool.naming_problem if is_known else services.pool.naming_problem and HIDDEN_ERROR,
        reload_error=services.reloader.problem if is_known else services.reloader.problem and HIDDEN_ERROR,
        trainers=[
            TrainerSummary(
                trainer_id=each.trainer_id, state=each.state, text=each.text if each.trainer_id in shown else None
            )
            for each in trainers
        ],
    )
    return answer(report, status=200 if ready else 503)


async def _known_tenant(request: Request, services: Services) -> str | None:
    try:
        principal = await services.authenticator.authenticate(dict(request.scope["headers"]))
    except (ClientError, StoreError):
        return None
    return principal.tenant if principal.session_id is None else None


async def _read_store(
    services: Services, tenant: str | None
) -> tuple[str | None, list[trainer_reports.TrainerStatus], set[str]]:
    """Return why the store cannot be read or written, what trainers report, and whose report the tenant may read."""

    def read(connection: Connection) -> tuple[list[trainer_reports.TrainerStatus], set[str]]:
        shown = [] if tenant is None else trainer_reports.trainer_statuses(connection, tenant)
        return trainer_reports.trainer_statuses(connection), {each.trainer_id for each in shown}

    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            trainers, shown = await services.database.fetch(read)
        await services.writer.check()
    except TimeoutError:
        return NO_ANSWER, [], set()
    except StoreError as error:
        return str(error), [], set()
    return None, trainers, shown


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request, services: Here) -> Response:
    """Return all metrics in Prometheus' text format, summed over the workers of this proxy.

    Keys of a tenant that does not own the model get the groups, trainers and last update of their own tenant and of
    the default policy, and no metrics of other tenants' policies. While the store does not answer, a key that was valid
    when it was looked up last gets the metrics that do not come from the store.
    """
    own: Mapping[StoredGauge, float] = {}
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            principal = await caller(request)
            await services.database.fetch(_read_gauges, services)
            is_shown_all = await is_operator(services, principal)
            if not is_shown_all:
                own = await services.database.fetch(_stored_gauges, principal.tenant)
    except (StoreError, TimeoutError) as error:
        failure = error if isinstance(error, StoreError) else StoreUnavailable(NO_ANSWER)
        services.metrics.background_errors.labels("gauges").inc()
        log.warning("the gauges that come from the store could not be read: %s", failure)
        known = services.authenticator.last_known(dict(request.scope["headers"]))
        if known is None:
            raise failure from error
        known.require(ACTION_OF_ROUTE["GET /metrics"])
        principal, is_shown_all = known, False
    rendered = await asyncio.to_thread(services.metrics.render)
    if not is_shown_all:
        rendered = _without_other_tenants(rendered, principal.tenant, own)
    return Response(rendered, media_type="text/plain; version=0.0.4")


def _without_other_tenants(rendered: bytes, tenant: str, own: Mapping[StoredGauge, float]) -> bytes:
    """Return metrics without those of other tenants; the gauges that come from the store have the tenant's values."""
    escaped = tenant.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    labelled, lines = f',tenant="{escaped}"}} '.encode(), []
    shown = {f'{name}{{{by}="{value}"}}' if by else name: number for (name, by, value), number in own.items()}
    for line in rendered.split(b"\n"):
        name = line.rpartition(b" ")[0].decode()
        if name.partition("{")[0] not in STORED:
            lines += [] if line.startswith(OF_TENANTS) and labelled not in line else [line]
        elif name in shown:
            lines.append(f"{name} {float(shown[name])!r}".encode())
    return b"\n".join(lines)


def _read_gauges(connection: Connection, services: Services) -> None:
    for (name, by, value), number in _stored_gauges(connection, None).items():
        gauge = services.metrics.stored[name]
        (gauge.labels(value) if by else gauge).set(number)
    for read in services.gauges:
        read(connection)


def _stored_gauges(connection: Connection, tenant: str | None) -> dict[StoredGauge, float]:
    """Return the gauges of groups, trainers and the last update: of all, or of those that a tenant may read."""
    unfinished = groups.unfinished_groups(connection, tenant)
    trainers = collections.Counter(each.state for each in trainer_reports.trainer_statuses(connection, tenant))
    found: dict[StoredGauge, float | None] = {
        **{("turnwise_groups", "status", status): count for status, count in unfinished.items()},
        **{("turnwise_trainers", "state", state.value): trainers[state] for state in trainer_reports.TrainerState},
    }
    if update := updates.last_update(connection, tenant=tenant):
        found["turnwise_last_update", "", ""] = update.update_id
        found["turnwise_last_update_timestamp_seconds", "", ""] = update.created_at.timestamp()
        found["turnwise_last_update_reward_mean", "", ""] = update.metrics.get("reward_mean")
        found["turnwise_last_update_trained_share", "", ""] = update.metrics.get("trained_share")
    return {name: number for name, number in found.items() if number is not None}
