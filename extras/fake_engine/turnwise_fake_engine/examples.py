"""Values that satisfy a JSON schema: the fake engine writes them if a request asks for JSON or for a tool call.

A value is the smallest valid one, with numbers from the user's message if they are valid. This is enough for test
suites that check shapes, and for suites that ask for `f(3)` and expect a 3.
"""

from __future__ import annotations

import re
from typing import Any

Schema = dict[str, Any]

_FORMATS = {
    "date-time": "2026-01-01T00:00:00Z",
    "date": "2026-01-01",
    "time": "00:00:00Z",
    "duration": "PT1S",
    "email": "user@example.com",
    "uuid": "00000000-0000-4000-8000-000000000000",
    "uri": "https://example.com",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "hostname": "example.com",
}
_MAX_DEPTH = 12
"""Depth at which optional branches of a recursive schema end."""


def example_of(schema: Schema, said: str = "") -> Any:
    """Return a value that satisfies `schema`, with numbers from the text `said`."""
    numbers = [float(number) for number in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", said)]
    return _value(schema, schema, numbers, 0)


def _value(schema: Any, root: Schema, numbers: list[float], depth: int) -> Any:
    schema = _resolved(schema, root)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    kind = _kind(schema)
    if kind == "object":
        return _object(schema, root, numbers, depth)
    if kind == "array":
        return _array(schema, root, numbers, depth)
    if kind in {"integer", "number"}:
        return _number(schema, numbers, whole=kind == "integer")
    if kind == "string":
        return _string(schema)
    return {"boolean": True, "null": None}.get(kind)


def _resolved(given: Any, root: Schema) -> Schema:
    """Resolve references and choose one of the alternatives; their sibling keys still apply."""
    if not isinstance(given, dict):
        return {}
    schema: Schema = given
    for _ in range(_MAX_DEPTH):
        beside = {key: value for key, value in schema.items() if key not in {"$ref", "anyOf", "oneOf", "allOf"}}
        if "$ref" in schema:
            schema = _referred(schema["$ref"], root) | beside
        elif alternatives := schema.get("anyOf") or schema.get("oneOf"):
            plain = [each for each in alternatives if each.get("type") != "null"]
            schema = {**(plain or alternatives)[0], **beside}
        elif "allOf" in schema:
            merged: Schema = {}
            for each in schema["allOf"]:
                merged |= _resolved(each, root)
            schema = merged | beside
        else:
            return schema
    return {}


def _referred(reference: str, root: Schema) -> Schema:
    target: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        if part:
            target = target.get(part.replace("~1", "/").replace("~0", "~"), {})
    return target if isinstance(target, dict) else {}


def _kind(schema: Schema) -> str:
    kind = schema.get("type")
    if isinstance(kind, list):
        kind = next((each for each in kind if each != "null"), "null")
    if kind is None:
        kind = "object" if "properties" in schema else "array" if "items" in schema else "string"
    return str(kind)


def _object(schema: Schema, root: Schema, numbers: list[float], depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    names = [name for name in schema.get("required", []) if name in properties]
    if depth < 3:
        names += [name for name in properties if name not in names and "default" not in properties[name]]
    if depth > _MAX_DEPTH:
        names = []
    return {name: _value(properties[name], root, numbers, depth + 1) for name in names}


def _array(schema: Schema, root: Schema, numbers: list[float], depth: int) -> list[Any]:
    if "prefixItems" in schema:
        return [_value(item, root, numbers, depth + 1) for item in schema["prefixItems"]]
    wanted = max(schema.get("minItems", 0), 1 if depth < 3 else 0)
    wanted = min(wanted, schema.get("maxItems", wanted))
    return [_value(schema.get("items", {}), root, numbers, depth + 1) for _ in range(wanted)]


def _number(schema: Schema, numbers: list[float], *, whole: bool) -> float | int:
    step = schema.get("multipleOf", 1 if whole else None)
    lowest = schema.get("minimum", schema.get("exclusiveMinimum"))
    highest = schema.get("maximum", schema.get("exclusiveMaximum"))
    fits = [number for number in numbers if _within(number, schema) and (step is None or number % step == 0)]
    if fits:
        value = numbers.pop(numbers.index(fits[0])) if len(numbers) > 1 else fits[0]
    elif lowest is not None:
        value = lowest
    else:
        value = min(1, highest) if highest is not None else 1
    if step is not None and value % step:
        value = -(-value // step) * step
    if not _within(value, schema):
        value = value + (step or 0.5) if value == schema.get("exclusiveMinimum") else value - (step or 0.5)
    return int(value) if whole else float(value)


def _within(number: float, schema: Schema) -> bool:
    return (
        schema.get("minimum", number) <= number <= schema.get("maximum", number)
        and not number <= schema.get("exclusiveMinimum", float("-inf"))
        and not number >= schema.get("exclusiveMaximum", float("inf"))
    )


def _string(schema: Schema) -> str:
    text = _FORMATS.get(schema.get("format", ""), "text")
    text = text.ljust(schema.get("minLength", 0), "x")
    return text[: schema["maxLength"]] if "maxLength" in schema else text
