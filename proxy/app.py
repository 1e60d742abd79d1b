"""The app of the control plane: its routes, and what an unknown path, a wrong method or an error is answered with."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

import orjson
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

import turnwise
from proxy.auth import ACTION_OF_ROUTE
from proxy.dialects.base import Dialect
from proxy.dialects.registry import CORE, Dialects
from proxy.http import problems
from proxy.routes import keys, openapi, operations, rewards, sessions
from proxy.routes.control import answer
from proxy.routes.declared import load_routes
from proxy.services import Services, services_of
from turnwise.errors import TurnwiseError

HTTP_ERRORS = {404: ("not_found_error", "no_route"), 405: ("invalid_request_error", "method_not_allowed")}
"""OpenAI `type` and `code` of requests that the router rejects."""
CALL_ENDINGS = ("/completions", "/responses", "/messages")
"""Ends of the paths that clients add to their base URL."""
BASE_URL_HINT = (
    "the base URL of an OpenAI client ends with /v1 or /sessions/NAME/v1, that of an Anthropic or Google client with "
    "the port or /sessions/NAME"
)
ROUTES_HINT = "GET /openapi.json lists the routes"


def create_app(
    services: Services | None = None, routes: Iterable[str] = (), dialects: Iterable[Dialect] = CORE
) -> FastAPI:
    """Build the app over running services; without services it only describes its routes, and those of `dialects`.

    `routes` are modules of features, each with `ROUTES`.
    """
    declared = load_routes(routes)
    app = FastAPI(
        title="Turnwise",
        version=turnwise.__version__,
        description="An OpenAI-compatible proxy with experience capture.",
        responses=openapi.ERRORS,
        # The OpenAPI document has its own route, which requires a key; FastAPI's pages load scripts from other hosts.
        openapi_url=None,
        redirect_slashes=False,
    )
    records = (sessions, rewards)
    for module in (*records, keys, operations, openapi):
        app.include_router(module.router)
    for own in declared:
        app.include_router(own.router)
        for path, files in own.files.items():
            if inspect.isroutine(files):
                app.add_route(path, files, include_in_schema=False)
            else:
                app.mount(path, files)
    app.add_exception_handler(TurnwiseError, _answer_error)
    app.add_exception_handler(Exception, _answer_unexpected)
    app.add_exception_handler(RequestValidationError, _answer_invalid)
    app.add_exception_handler(HTTPException, _answer_http)
    app.state.services = services
    app.state.dialects = Dialects(dialects) if services is None else services.dialects
    app.state.actions = ACTION_OF_ROUTE | {route: action for own in declared for route, action in own.actions.items()}
    app.state.endpoints = [own.endpoints for own in declared]
    app.state.answers = [own.answers for own in declared]
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, TurnwiseError)
    status, body, headers = problems.answer(error)
    services_of(request).metrics.refused.labels(problems.code_of(error)).inc()
    return Response(body, status_code=status, headers=headers, media_type="application/json")


async def _answer_invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first: dict[str, Any] = error.errors()[0]
    is_json = first["type"] != "json_invalid"
    services_of(request).metrics.refused.labels("invalid_request" if is_json else "invalid_json").inc()
    if not is_json:
        message = f"the request body is not JSON: {first['ctx']['error']}; NaN and Infinity are not JSON either"
        return answer(problems.body(message, "invalid_request_error", "invalid_json"), status=422)
    place = [str(part) for part in first["loc"][1:]]
    if place[:1] == ["0"] and not isinstance(error.body, list):
        place = place[1:]  # one reward line is read as a list of one
    where = ".".join(place) or str(first["loc"][0])
    message = _sentence(request, first, where)
    return answer(problems.body(message, "invalid_request_error", "invalid_request", where), status=422)


def _sentence(request: Request, first: Mapping[str, Any], where: str) -> str:
    if isinstance(first.get("input"), bytes | str) and where in ("body", "0"):
        sent = request.headers.get("content-type", "none")
        return f"The body was not read as JSON (content-type: {sent}). Send content-type: application/json."
    if first["type"] == "missing":
        return f"`{where}` is missing."
    if first["type"] == "extra_forbidden":
        return f"`{where}`: no such field; GET /openapi.json lists the fields."
    message: str = first["msg"].removeprefix("Value error, ")
    return message if where == "body" and first["type"] == "value_error" else f"`{where}`: {message}"


async def _answer_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    is_call = error.status_code == HTTPStatus.NOT_FOUND and path.endswith(CALL_ENDINGS)
    message = f"{request.method} {path}: {error.detail}; {BASE_URL_HINT if is_call else ROUTES_HINT}"
    kind, code = HTTP_ERRORS.get(error.status_code, ("invalid_request_error", "invalid_request"))
    services_of(request).metrics.refused.labels(code).inc()
    methods = _methods(request) if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED else []
    headers = {"allow": ", ".join(methods)} if methods else error.headers
    body = orjson.dumps(problems.body(message, kind, code))
    encoded = request.app.state.dialects.of_path(path, dict(request.headers.raw)).encode_error(error.status_code, body)
    return Response(encoded, status_code=error.status_code, headers=headers, media_type="application/json")


def _methods(request: Request) -> list[str]:
    """Return the methods of all routes with the request's path; the router reports those of the first only."""
    found: set[str] = set()
    for route in request.app.router.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


async def _answer_unexpected(request: Request, error: Exception) -> Response:  # noqa: ARG001  uvicorn logs it
    return await _answer_error(request, problems.UNEXPECTED)
