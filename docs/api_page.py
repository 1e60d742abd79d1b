# ruff: noqa: E501  tables of the page are one line a row
"""Writes docs/api.md from the OpenAPI document: each route of the control plane with fields, a call and an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from proxy import features
from proxy.app import create_app
from proxy.auth import MAY, PHRASES
from proxy.routes.openapi import describe
from turnwise.chains import EID, Experience
from turnwise.features import PARTS
from turnwise.settings import field_docs

Schema = Mapping[str, Any]

INTRODUCTION = """# HTTP reference

This page lists the HTTP routes of the control plane: sessions, turns, rewards, experiences, policies and keys. `make docs`
writes it from the OpenAPI document, which a running proxy serves at `GET /openapi.json`. Model calls use the APIs of
OpenAI, Anthropic and Google: see [dialects.md](dialects.md). `$PROXY` is the proxy's address and `$KEY` an API key; a proxy
without keys needs none.

Every error is `{"error": {"message", "type", "param", "code"}}`: the message says what to do, and programs read `code`.
Lists are `{"object": "list", "data": […], "has_more": true}`; to get the next page, pass the id of the last row as `after`.
A field that is `null` is not known yet or does not apply.

| status | meaning |
|---|---|
| 403 | the key has no permission |
| 404 | this tenant has no object with this id |
| 409 | the object's state does not allow the request |
| 422 | a field or parameter is invalid |
| 503 | temporarily unavailable: retry |
"""
EXPERIENCE = """## An experience, field by field

`GET /v1/experiences` gives one JSON line for each trainable turn, or with `merge=chain` for each sequence that the trainer packs.
Sessions count once they are over and have a reward. `loss_mask` and `logprobs` begin after the prompt, as in Trinity-RFT.

| field | means |
|---|---|
"""
GROUPS = """## Which groups are trainable

[concepts.md](concepts.md#groups) lists the cases. `training_note` in the answer to `POST /v1/sessions/{session_id}/end`
says which one holds for the session's group. A group that is not trained has the status `dropped` and a reason such as
`uniform_rewards` or `stale`. `trained_in` of a session, turn or experience names the update that trained it.
"""


def api() -> str:
    """Return the whole page."""
    app = create_app(routes=features.ROUTES, dialects=features.DIALECTS)
    document, actions = describe(app), app.state.actions
    schemas = document["components"]["schemas"]
    parts = [INTRODUCTION]
    for path, operations in sorted(document["paths"].items()):
        for method, operation in sorted(operations.items()):
            if f"{method.upper()} {path}" in actions:
                parts.append(
                    "\n".join(_route(method.upper(), path, actions[f"{method.upper()} {path}"], operation, schemas))
                    + "\n"
                )
    for title, name in (
        ("A session", "SessionAnswer"),
        ("A turn", "TurnAnswer"),
        ("A reward", "RewardAnswer"),
        ("Feedback", "FeedbackAnswer"),
        ("An update", "UpdateAnswer"),
        ("A policy version", "PolicyAnswer"),
    ):
        rows = _fields(schemas[name], schemas, with_required=False)
        parts.append("\n".join([f"## {title}, field by field", "", *rows]) + "\n")
    fields = field_docs(Experience)
    del fields["parts"], fields["turn_shares"]
    of_parts = {name: text for part in PARTS for name, text in part.joined_fields.items()}
    lines = [f"| `{_experience_name(name)}` | {text} |" for name, text in (fields | of_parts).items()]
    eid = ", ".join(f"`{name}`" for name in EID.__dataclass_fields__)
    about_eid = f"Its identity: {eid}. `batch` is the group, `suffix` the id of its first turn."
    parts.append(EXPERIENCE + "\n".join([f"| `eid` | {about_eid} |", *lines]) + "\n")
    parts.append(GROUPS)
    return "\n".join(parts)


def _experience_name(name: str) -> str:
    return {"turn_returns": "return"}.get(name, name)


def _route(method: str, path: str, action: str, operation: Schema, schemas: Schema) -> Iterator[str]:
    able = ", ".join(f"`{role}`" for role in MAY if action in MAY[role])
    yield f"## `{method} {path}`"
    yield ""
    yield " ".join(operation["description"].split()) if "description" in operation else operation["summary"]
    yield ""
    yield f"Keys that may {PHRASES[action]}: {able}."
    parameters = [each for each in operation.get("parameters", []) if each["in"] != "path"]
    if parameters:
        yield from ["", "| parameter | type | means |", "|---|---|---|"]
        for each in parameters:
            means = " ".join(each.get("description", "").split())
            where = "header " if each["in"] == "header" else ""
            yield f"| {where}`{each['name']}` | {_type(each['schema'], schemas)} | {means} |"
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema")
    fields = _resolved(body, schemas) if body else None
    if fields and "properties" in fields:
        yield from ["", *_fields(fields, schemas, with_required=True)]
    yield from ["", "```bash", _curl(method, path, fields, schemas), "```"]
    answered = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema")
    if answered:
        sample = json.dumps(_sample(answered, schemas), indent=1, ensure_ascii=False)
        yield from ["", "```json", sample, "```"]


def _curl(method: str, path: str, body: Schema | None, schemas: Schema) -> str:
    for name, value in (("{session_id}", "s"), ("{turn_id}", "chatcmpl-1"), ("{version}", "1"), ("{key_id}", "KEY_ID")):
        path = path.replace(name, value)
    command = f'curl -s "$PROXY{path}" -H "authorization: Bearer $KEY"'
    if method == "DELETE":
        command += " -X DELETE"
    if method == "POST":
        required = (body or {}).get("required", [])
        properties = (body or {}).get("properties", {})
        given = {name: _sample(properties[name], schemas) for name in required}
        if "value" in given:
            given = {"session_id": "s", **given}
        command += f" -H 'content-type: application/json' -d '{json.dumps(given, ensure_ascii=False)}'"
    return command


def _fields(schema: Schema, schemas: Schema, *, with_required: bool) -> Iterator[str]:
    yield "| field | type | means |"
    yield "|---|---|---|"
    for name, each in schema["properties"].items():
        needed = " (required)" if with_required and name in schema.get("required", []) else ""
        means = " ".join(each.get("description", "").split()).replace("|", "\\|")
        yield f"| `{name}`{needed} | {_type(each, schemas)} | {means} |"


def _resolved(schema: Schema, schemas: Schema) -> Schema:
    """Return a schema without a reference, and of alternatives the first that is an object."""
    if "$ref" in schema:
        return _resolved(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    for each in schema.get("anyOf", []):
        found = _resolved(each, schemas)
        if "properties" in found:
            return found
    return schema


def _type(schema: Schema, schemas: Schema) -> str:
    if "$ref" in schema:
        found = _resolved(schema, schemas)
        return " or ".join(f"`{value}`" for value in found["enum"]) if "enum" in found else "object"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each, schemas) for each in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), schemas)}"
    return str(schema.get("format") or schema.get("type", "any"))


def _sample(schema: Schema, schemas: Schema) -> Any:
    """Return a value that a schema allows, the same one each time."""
    if "$ref" in schema:
        return _sample(_resolved(schema, schemas), schemas)
    for alternative in schema.get("anyOf", []):
        return _sample(alternative, schemas)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type")
    if kind == "object":
        return {name: _sample(each, schemas) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [_sample(schema.get("items", {}), schemas)]
    if schema.get("format") == "date-time":
        return "2026-01-31T12:00:00+00:00"
    return {"string": "…", "integer": 1, "number": 1.0, "boolean": True}.get(str(kind))
