"""The OpenAPI document: FastAPI's own for the control plane, and the dialects' routes, which are plain ASGI.

A dialect's route describes only the body fields that the proxy itself reads; any further field is passed to the engine.
"""

from __future__ import annotations

import re
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from proxy.dialects.base import SESSION_PREFIX, Action, Dialect, WireRoute
from proxy.routes.control import Body, Caller, answer, describe_answer
from turnwise.settings import field_docs
from turnwise.types import Json

router = APIRouter(tags=["operations"])
ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {**describe_answer("ErrorAnswer")[200], "description": "What the caller can change"},
    "5XX": {
        **describe_answer("ErrorAnswer")[200],
        "description": "What the engine or the store must recover from; retry",
    },
}
"""Documented for every route; passed to FastAPI, which would otherwise describe its own 422."""
WITHOUT_KEY = frozenset({"/healthz", "/readyz"})
IN_PATH: Json = {"in": "path", "required": True, "schema": {"type": "string"}}
HEADERS: list[Json] = [
    {"name": "X-Session-Id", "in": "header", "schema": {"type": "string", "maxLength": 256}},
    {"name": "X-Step", "in": "header", "schema": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 256}},
]
PATH_PARAMETER = re.compile(r"\{(\w+)\}")
CONVERTOR = re.compile(r":\w+\}")


def _operation(dialect: Dialect, route: WireRoute, *, in_session: bool) -> Json:
    path, samples = _path(route), route.action is Action.SAMPLE
    content: Json = {"application/json": {"schema": {"type": "object"}}}
    if samples:
        content["text/event-stream"] = {"schema": {}}
    error: Json = {"application/json": {"schema": dialect.error_schema}}
    names = (["session_id"] if in_session else []) + PATH_PARAMETER.findall(path)
    operation: Json = {
        "summary": route.summary,
        "operationId": f"{route.method.lower()}{path}{'_in_session' if in_session else ''}".replace("/", "_"),
        "tags": ["calls"],
        "parameters": [{"name": name, **IN_PATH} for name in names] + (HEADERS if samples else []),
        "responses": {
            "200": {"description": "The answer in the dialect's format", "content": content},
            "4XX": {"description": ERRORS["4XX"]["description"], "content": error},
            "5XX": {"description": ERRORS["5XX"]["description"], "content": error},
        },
    }
    if route.required:
        schema = {"type": "object", "properties": route.properties, "required": list(route.required)}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation


def _path(route: WireRoute) -> str:
    return CONVERTOR.sub("}", route.path)


def _bodies(base: type[Body]) -> list[type[Body]]:
    return [each for own in base.__subclasses__() for each in (own, *_bodies(own))]


def describe(app: FastAPI) -> Json:
    from proxy.routes import models

    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for dialect in app.state.dialects:
        for route in dialect.routes:
            for prefix in ("", SESSION_PREFIX):
                operation = _operation(dialect, route, in_session=bool(prefix))
                document["paths"].setdefault(prefix + _path(route), {})[route.method.lower()] = operation
    schemas = document["components"]["schemas"]
    for body in _bodies(Body):
        for name, text in field_docs(body, Body).items() if body.__name__ in schemas else ():
            schemas[body.__name__]["properties"][name]["description"] = text
    schemas |= models.schemas(app.state.answers)
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in WITHOUT_KEY else [{"key": []}]
    return document


@router.get("/openapi.json", include_in_schema=False)
async def document(request: Request, _: Caller) -> Response:
    """Return the OpenAPI document."""
    return answer(describe(request.app))
