"""Langfuse's exports: generations, and traces with their observations and scores.

Generations of one session, or else of one trace, are one session. Field names are accepted in both of Langfuse's
spellings, `traceId` and `trace_id`. A numeric score is a reward with the score's name.
"""

from __future__ import annotations

import json
from typing import Any

from turnwise.errors import BadLine, SkippedLine
from turnwise.types import Json
from turnwise_formats.values import call_draft, message_list, reply_of


def key_of(document: Json) -> str | None:
    """Return the session or trace of a document."""
    own = document.get("id") if "observations" in document else None
    found = _field(document, "sessionId") or _field(document, "traceId") or own
    return None if found is None else str(found)


def drafts_of(document: Json) -> list[Json]:
    """Return the session with the generations of a trace, or with one generation.

    Raises:
        SkippedLine: it holds no generation, or one that failed.
        BadLine: a generation's input or output is missing or broken.
    """
    observations = document.get("observations")
    if observations is None:
        return [{"conversations": [_generation(document)], "rewards": _scores(document)}]
    if not isinstance(observations, list) or not all(isinstance(one, dict) for one in observations):
        raise BadLine("its observations are not objects: export traces with their observations")
    generations = [one for one in observations if _is_generation(one) and _field(one, "level") != "ERROR"]
    if not generations:
        raise SkippedLine("a trace without a generation")
    generations.sort(key=lambda one: str(_field(one, "startTime") or ""))
    return [{"conversations": [_generation(one) for one in generations], "rewards": _scores(document)}]


def _generation(document: Json) -> Json:
    if not _is_generation(document):
        raise SkippedLine(f"an observation of type {document.get('type')}")
    if _field(document, "level") == "ERROR":
        raise SkippedLine("a failed generation")
    request = _value(document.get("input"))
    tools: Any = None
    if isinstance(request, dict):
        tools = request.get("tools")
        request = request.get("messages") or request.get("input")
    if isinstance(request, str):
        request = [{"role": "user", "content": request}]
    return call_draft(
        message_list(request),
        reply_of(_value(document.get("output"))),
        tools=tools or _object(_field(document, "modelParameters")).get("tools"),
        model=str(document.get("model") or _field(document, "providedModelName") or ""),
        ended=_field(document, "endTime") or _field(document, "startTime"),
    )


def _is_generation(document: Json) -> bool:
    return str(document.get("type") or "").upper() == "GENERATION"


def _scores(document: Json) -> dict[str, float]:
    """Return the numeric scores by name, the newest of each name."""
    found = _value(document.get("scores")) or []
    scores = [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
    scores.sort(key=lambda one: str(_field(one, "timestamp") or _field(one, "createdAt") or ""))
    return {
        str(one.get("name") or "reward"): float(one["value"])
        for one in scores
        if isinstance(one.get("value"), int | float)
    }


def _field(document: Json, name: str) -> Any:
    """Return a field by its name in camel case, or by the same name in snake case."""
    if document.get(name) is not None:
        return document[name]
    return document.get("".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name))


def _value(value: Any) -> Any:
    """Return a value that may be stored as JSON text."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return json.loads(value)
        except ValueError:
            return value  # a text that begins with a bracket
    return value


def _object(value: Any) -> Json:
    found = _value(value)
    return found if isinstance(found, dict) else {}
