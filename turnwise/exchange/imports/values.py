"""Values of files that people hand over: JSON that every reader reads alike, and numbers in any form."""

from __future__ import annotations

import json
import math
from typing import Any

from turnwise.errors import BadLine
from turnwise.types import MAX_REWARD, Json


def value_of_json(text: str | bytes) -> Any:
    """Return the value of JSON text that every reader reads alike.

    Raises:
        BadLine: it is not JSON, a number is not finite, or an object has a name twice.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_finite, object_pairs_hook=_once_named)
    except (ValueError, RecursionError) as error:
        shown = repr(text).removeprefix("b")
        raise BadLine(f"{shown:.80} is not JSON: {error}") from error


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _once_named(pairs: list[tuple[str, Any]]) -> Json:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"an object has the name {next(name for name in names if names.count(name) > 1)!r:.60} twice")
    return found


def number_of(value: Any, name: str) -> float | None:
    """Return a number of a file, which may be written as text or as a truth value; None where there is none.

    Raises:
        BadLine: it is no number up to the largest reward.
    """
    if value is None:
        return None
    try:
        found = float(
            {"true": 1.0, "false": 0.0}.get(value.strip().lower(), value) if isinstance(value, str) else value
        )
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not abs(found) <= MAX_REWARD or "_" in str(value):  # float() reads 1_0 as 10
        raise BadLine(f"its {name} is {value!r:.80}, not a number from {-MAX_REWARD:g} to {MAX_REWARD:g}")
    return found
