"""JSON schemas of request fields that several dialects describe in the OpenAPI document."""

from __future__ import annotations

from turnwise.types import Json

MESSAGES: Json = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "object", "properties": {"role": {"type": "string"}}, "required": ["role"]},
}
STREAM: Json = {"type": "boolean", "default": False}
IDENTITY: Json = {
    "type": "object",
    "properties": {
        "session_id": {"type": "string"},
        "step": {"type": ["integer", "string"], "minimum": 0, "maximum": 2**31 - 1},
    },
}
"""`metadata`, which may name the session and the step."""
