"""Import of Langfuse's exports: generations, and traces with their observations and scores.

Generations of one session, or else of one trace, are one session. Field names are accepted in both of Langfuse's
spellings, `traceId` and `trace_id`. A numeric score is a reward with the score's name.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection
from typing import Any

from turnwise.errors import BadLine, SkippedLine
from turnwise.exchange.imports.values import number_of, value_of_json
from turnwise.types import Json
from turnwise_formats.values import call_draft, instant, message_list, reply_of, with_system

NO_TIME = dt.datetime.min.replace(tzinfo=dt.UTC)
NUMBERS = ("NUMERIC", "BOOLEAN", None)
"""Data types of scores that are numbers; the value of a category is 0 or its place in a list."""


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
    generations.sort(key=lambda one: instant(_field(one, "startTime")) or NO_TIME)
    others = {_field(one, "id") for one in observations if not _is_generation(one)}
    rewards = _scores(document, len(generations), others)
    return [{"conversations": [_generation(one) for one in generations], "rewards": rewards}]


def _generation(document: Json) -> Json:
    if not _is_generation(document):
        raise SkippedLine(f"an observation of type {document.get('type')}")
    if _field(document, "level") == "ERROR":
        raise SkippedLine("a failed generation")
    request = _value(document.get("input"))
    whole = request if isinstance(request, dict) else {}
    if isinstance(request, dict):
        request = request.get("messages") or request.get("input")
    if isinstance(request, str):
        request = [{"role": "user", "content": request}]
    return call_draft(
        with_system(whole, message_list(request)),
        reply_of(_value(document.get("output"))),
        tools=whole.get("tools") or _object(_field(document, "modelParameters")).get("tools"),
        model=str(document.get("model") or _field(document, "providedModelName") or ""),
        ended=_field(document, "endTime") or _field(document, "startTime"),
    )


def _is_generation(document: Json) -> bool:
    return str(document.get("type") or "").upper() == "GENERATION"


def _scores(document: Json, num_generations: int = 1, others: Collection[Any] = ()) -> dict[str, float]:
    """Return the numeric scores by name, the newest of each name; beside several generations not those of `others`.

    Raises:
        BadLine: which score of a name is the newest is not known, or a numeric score has no number, or is that of one
            of several generations.
    """
    found = _value(document.get("scores")) or []
    if not isinstance(found, list):
        raise BadLine(f"its scores are {found!r:.80}, not a list")
    newest: dict[str, tuple[dt.datetime | None, float]] = {}
    for one in (one for one in found if isinstance(one, dict)):
        kind, value = _field(one, "dataType"), one.get("value")
        if kind not in NUMBERS or isinstance(value, str | None) or (kind is None and _field(one, "stringValue")):
            continue
        name = str(one.get("name") or "reward")
        of = _field(one, "observationId") if num_generations > 1 else None
        if of and of in others:
            continue
        if of:
            raise BadLine(f"its score {name!r} is that of one of {num_generations} generations, and none of them all")
        scored = number_of(value, f"score {name!r}")
        at = instant(_field(one, "timestamp") or _field(one, "createdAt"))
        before, other = newest.get(name, (NO_TIME, None))
        if other not in (None, scored) and (at is None or before is None or at == before):
            raise BadLine(f"it has several scores {name!r}, and not the times that tell which is the newest")
        if other is None or at is None or before is None or at > before:
            newest[name] = at, scored or 0.0
    return {name: value for name, (_, value) in newest.items()}


def _field(document: Json, name: str) -> Any:
    """Return a field by its name in camel case, or by the same name in snake case."""
    if document.get(name) is not None:
        return document[name]
    return document.get("".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name))


def _value(value: Any) -> Any:
    """Return a value that may be stored as JSON text."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return value_of_json(value)
        except BadLine as error:
            if value.startswith(('{"', "[{", '["')):
                raise BadLine(f"{error}; was it cut when it was logged?") from error
            return value  # a text that begins with a bracket
    return value


def _object(value: Any) -> Json:
    found = _value(value)
    return found if isinstance(found, dict) else {}
