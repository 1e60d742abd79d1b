"""The memory of decoded JSON: what the objects of a value take, not the bytes of its text."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any


def json_bytes(value: Any) -> int:
    """Return the memory of a decoded JSON value."""
    return all_json_bytes([value])


def all_json_bytes(values: Sequence[Any]) -> int:
    """Return the memory of decoded JSON values; the names of fields are shared by all objects and are not counted."""
    num_bytes, level = 0, values
    while level:
        num_bytes += sum(map(sys.getsizeof, level))
        nested: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                nested += each.values()
            elif isinstance(each, list):
                nested += each
        level = nested
    return num_bytes
