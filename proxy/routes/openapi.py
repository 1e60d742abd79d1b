"""The OpenAPI document: FastAPI's own for the control plane, and by hand the calls, which are plain ASGI.

One decision: of a call's body only what the proxy itself relies on is described. Everything else is between the client
and the engine, so any further field is allowed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from proxy.routes.models import ErrorAnswer
from turnwise.types import Json

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "What the caller can change"},
    "5XX": {"model": ErrorAnswer, "description": "What the engine or the store must recover from; retry"},
}
"""Documented for every route; given to FastAPI, which else would describe a 422 of its own."""
WITHOUT_KEY = frozenset({"/healthz", "/readyz"})
MESSAGES: Json = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]},
}
STREAM: Json = {"type": "boolean", "default": False}
IDENTITY: Json = {
    "type": "object",
    "properties": {
        "session_id": {"type": "string", "maxLength": 256},
        "step": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1},
    },
}
HEADERS: list[Json] = [
    {"name": "X-Session-Id", "in": "header", "schema": {"type": "string", "maxLength": 256}},
    {"name": "X-Step", "in": "header", "schema": {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}},
    {"name": "Idempotency-Key", "in": "header", "schema": {"type": "string", "maxLength": 256}},
]
SESSION_IN_PATH: Json = {"name": "session_id", "in": "path", "required": True, "schema": {"type": "string"}}


@dataclasses.dataclass(frozen=True, slots=True)
class Described:
    """One route of the data plane."""

    method: str
    path: str
    summary: str
    required: tuple[str, ...] = ()
    properties: Mapping[str, Json] = dataclasses.field(default_factory=dict)
    """What the proxy reads of the body."""
    streams: bool = False

    def operation(self, *, in_session: bool) -> Json:
        """Return its OpenAPI operation."""
        content: Json = {"application/json": {"schema": {"type": "object"}}}
        if self.streams:
            content["text/event-stream"] = {"schema": {"type": "string"}}
        error: Json = {"application/json": {"schema": {}}}
        operation: Json = {
            "summary": self.summary,
            "operationId": f"{self.method}{self.path}{'_in_session' if in_session else ''}".replace("/", "_"),
            "tags": ["calls"],
            "parameters": ([SESSION_IN_PATH] if in_session else []) + (HEADERS if self.streams else []),
            "responses": {
                "200": {"description": "What the engine says, in its own words", "content": content},
                "4XX": {"description": ERRORS["4XX"]["description"], "content": error},
                "5XX": {"description": ERRORS["5XX"]["description"], "content": error},
            },
        }
        if self.required:
            schema = {"type": "object", "properties": self.properties, "required": list(self.required)}
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        return operation


CALLS = (
    Described(
        "post",
        "/v1/chat/completions",
        "Sample a reply to a conversation, as OpenAI's chat completions",
        ("messages",),
        {"messages": MESSAGES, "stream": STREAM, "n": {"type": "integer", "minimum": 1}, "metadata": IDENTITY},
        streams=True,
    ),
    Described(
        "post",
        "/v1/completions",
        "Continue a text or token ids, as OpenAI's completions",
        ("prompt",),
        {"prompt": {"type": ["string", "array"]}, "stream": STREAM, "n": {"type": "integer", "minimum": 1}},
        streams=True,
    ),
    Described(
        "post",
        "/v1/responses",
        "Sample a reply, as OpenAI's responses",
        ("input",),
        {"input": {"type": ["string", "array"]}, "stream": STREAM, "metadata": IDENTITY},
        streams=True,
    ),
    Described(
        "post",
        "/v1/messages",
        "Sample a reply, as Anthropic's messages",
        ("messages", "max_tokens"),
        {"messages": MESSAGES, "max_tokens": {"type": "integer", "minimum": 1}, "stream": STREAM},
        streams=True,
    ),
    Described(
        "post",
        "/v1/messages/count_tokens",
        "Count a prompt's tokens, as Anthropic's",
        ("messages",),
        {"messages": MESSAGES},
    ),
    Described("get", "/v1/models", "List what the engine serves"),
)


def describe(app: FastAPI) -> Json:
    """Return the whole document."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for call in CALLS:
        for prefix in ("", "/sessions/{session_id}"):
            operation = call.operation(in_session=bool(prefix))
            for status in ("4XX", "5XX"):
                operation["responses"][status]["content"]["application/json"]["schema"] = _error_schema(call)
            document["paths"].setdefault(prefix + call.path, {})[call.method] = operation
    document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in WITHOUT_KEY else [{"key": []}]
    return document


def _error_schema(call: Described) -> Json:
    """Return the shape of an error: ours, or Anthropic's where the client speaks that."""
    if call.path.startswith("/v1/messages"):
        return {"type": "object", "required": ["type", "error"], "properties": {"type": {"const": "error"}}}
    return {"$ref": "#/components/schemas/ErrorAnswer"}
