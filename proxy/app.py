"""The server: `create_app(settings)` builds it, the lifespan starts and stops what it needs; importing does nothing."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import ipaddress
import logging
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

import turnwise
from proxy import problems
from proxy.auth import Authenticator
from proxy.engines import Engine, EnginePool
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.probe import check_capture, find_template, has_lora
from proxy.relay import Relay
from proxy.reload import Reloader
from proxy.replays import Replays
from proxy.sessions import Sessions
from proxy.settings import ProxySettings
from proxy.writer import Writer
from turnwise.errors import EngineUnsuitable, SettingsError, TurnwiseError
from turnwise.store import keys, ledger
from turnwise.store.database import Database
from turnwise.types import utc_now

log = logging.getLogger(__name__)

NUM_READERS = 8
"""Database connections for reading."""
NUM_EXPORTS = 4
"""Exports at once: each holds a connection for as long as its client takes to read."""
HTTP_ERRORS = {404: ("not_found_error", "no_route"), 405: ("invalid_request_error", "method_not_allowed")}
"""OpenAI `type` and `code` of what the router refuses."""
SWEEP_SECONDS = 5.0
"""How often idle sessions, and answers that are old enough to forget, are looked for."""


@dataclasses.dataclass(slots=True)
class Services:
    """Everything that a request may need, made once per process."""

    settings: ProxySettings
    metrics: Metrics
    database: Database
    exports: Database
    """For answers that are streamed from an open transaction, so that slow clients take nothing from the others."""
    writer: Writer
    pool: EnginePool
    sessions: Sessions
    relay: Relay
    reloader: Reloader
    authenticator: Authenticator
    replays: Replays


def services_of(request: Request) -> Services:
    """Return the services of the app that serves this request."""
    return cast("Services", request.app.state.services)


def create_app(settings: ProxySettings) -> FastAPI:
    """Build the server; nothing is opened before its lifespan starts."""
    from proxy import openapi
    from proxy.routes import dashboard, data, operations, policies, rewards, sessions

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with running_services(settings) as services:
            app.state.services = services
            app.state.endpoints = data.endpoints(services)
            app.router.routes[:0] = data.routes(app.state.endpoints)
            yield

    app = FastAPI(
        title="Turnwise",
        version=turnwise.__version__,
        description="An OpenAI-compatible proxy with experience capture.",
        lifespan=lifespan,
        responses=openapi.ERRORS,
        # The document is a route of ours, behind a key; pages that load scripts from elsewhere are not served.
        openapi_url=None,
        redirect_slashes=False,
    )
    for router in (sessions.router, rewards.router, policies.router, operations.router, dashboard.router):
        app.include_router(router)
    app.add_exception_handler(TurnwiseError, _answer_error)
    app.add_exception_handler(Exception, _answer_unforeseen)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    return app


@contextlib.asynccontextmanager
async def running_services(settings: ProxySettings) -> AsyncIterator[Services]:
    """Open the store and the engines, start the background tasks, and close it all again.

    Raises:
        SettingsError: the proxy would listen beyond loopback without any API key.
        SchemaMismatch: the store's tables are of another release.
        EngineUnsuitable: an engine lacks what exact capture needs, and the check is strict.
    """
    url = settings.database.get_secret_value()
    database = Database(url, pool_size=NUM_READERS)
    exports = Database(url, pool_size=NUM_EXPORTS)
    await asyncio.to_thread(database.check_schema)
    secret = await asyncio.to_thread(_read_secret, database, settings)
    metrics, faults = Metrics(), FaultPoints(settings.fault)
    writer = Writer(url, metrics, timeout_seconds=settings.commit_timeout_seconds, fault=settings.fault)
    await writer.start()
    pool = EnginePool(
        settings.engine,
        metrics,
        timeout_seconds=settings.engine_timeout_seconds,
        max_concurrent_calls=settings.max_concurrent_calls,
    )
    sessions = Sessions(database, writer, settings, metrics, faults)
    relay = Relay(database, pool, sessions, writer, metrics, faults)
    reloader = Reloader(
        database,
        writer,
        pool,
        settings,
        metrics,
        learn=lambda engine: _learn_engine(engine, relay, settings),
        faults=faults,
    )
    services = Services(
        settings=settings,
        metrics=metrics,
        database=database,
        exports=exports,
        writer=writer,
        pool=pool,
        sessions=sessions,
        relay=relay,
        reloader=reloader,
        authenticator=Authenticator(database, secret),
        replays=Replays(settings.replay_bytes),
    )
    await reloader.start()
    tasks = [asyncio.create_task(reloader.run()), asyncio.create_task(_sweep(services))]
    try:
        yield services
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        pool.close()
        await writer.close()
        for opened in (database, exports):
            opened.close()


def _read_secret(database: Database, settings: ProxySettings) -> bytes:
    """Return the secret that signs session keys, once it is sure that only those with a key get in."""
    with database.write() as connection:
        secret = keys.server_secret(connection)
        has_keys = keys.any_keys(connection)
    if not has_keys and not _is_loopback(settings.host):
        raise SettingsError(
            f"without API keys the proxy serves loopback only, not {settings.host!r}; "
            "make one with `turnwise keys create`"
        )
    if settings.secret is not None:
        secret = settings.secret.get_secret_value().encode()
    return secret


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _learn_engine(engine: Engine, relay: Relay, settings: ProxySettings) -> None:
    """Find out what an engine can do, and refuse it if capture would not be exact.

    Raises:
        EngineUnsuitable: it lacks something, and the check is strict.
    """
    if settings.engine_check == "off":
        return
    engine.has_lora = await has_lora(engine)
    try:
        await check_capture(engine)
    except EngineUnsuitable as unsuitable:
        if settings.engine_check == "strict":
            raise
        log.warning("%s", unsuitable)
    if relay.template is None:
        relay.template = await find_template(engine, settings.tokenizer)


async def _sweep(services: Services) -> None:
    """Expire idle sessions and forget old answers, for ever."""
    idle = datetime.timedelta(seconds=services.settings.session_idle_seconds)
    remembered = datetime.timedelta(seconds=services.settings.reward_replay_seconds)
    while True:
        try:
            await services.writer.do(ledger.forget_answers, utc_now() - remembered)
            expired = await services.writer.do(ledger.expire_idle_sessions, utc_now() - idle)
            for tenant, session_id in expired:
                services.sessions.forget(tenant, session_id)
            services.metrics.sessions.labels("expired").inc(len(expired))
        except TurnwiseError as error:
            services.metrics.background_errors.labels("sweep").inc()
            log.warning("idle sessions could not be swept: %s", error)
        await asyncio.sleep(SWEEP_SECONDS)


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TurnwiseError)
    status, body, headers = problems.answer(error)
    services_of(request).metrics.refused.labels(problems.lookup(error)[2]).inc()
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    services_of(request).metrics.refused.labels("invalid_request").inc()
    first: dict[str, Any] = error.errors()[0]
    if first["type"] == "json_invalid":
        message = f"the request body is not JSON: {first['ctx']['error']}; NaN and Infinity are not JSON either"
        return _plain(422, problems.body(message, "invalid_request_error", "invalid_json"))
    where = ".".join(str(part) for part in first["loc"][1:]) or str(first["loc"][0])
    message = f"`{where}`: {first['msg'].removeprefix('Value error, ')}"
    return _plain(422, problems.body(message, "invalid_request_error", "invalid_request", where))


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}; GET /openapi.json lists the routes"
    kind, code = HTTP_ERRORS.get(error.status_code, ("invalid_request_error", "invalid_request"))
    headers = {"allow": ", ".join(_methods(request))} if error.status_code == 405 else error.headers
    return _plain(error.status_code, problems.body(message, kind, code), headers)


def _methods(request: Request) -> list[str]:
    """Return what the path of a request can be asked with: the router looks no further than its first route."""
    found: set[str] = set()
    for route in request.app.router.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


async def _answer_unforeseen(request: Request, error: Exception) -> Response:  # noqa: ARG001  uvicorn logs it
    services_of(request).metrics.refused.labels("internal_error").inc()
    message = "the proxy failed to serve this request; its log has the traceback, retry"
    return _plain(500, problems.body(message, "server_error", "internal_error"))


def _plain(status: int, body: Any, headers: Mapping[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status_code=status, headers=headers, media_type="application/json")
