"""The JSON of clients: scanned for size and depth before it is decoded; integers of any length stay exact.

Decoding holds the interpreter's lock for the whole text, and a text of a few megabytes such as `[],[],[],…` takes
seconds. NumPy scans it without the lock and without making objects, in windows so that its memory stays small.

orjson decodes an integer beyond 64 bits as the nearest float and refuses to encode one. msgspec decodes it exactly, at
nearly the same speed.
"""

from __future__ import annotations

import dataclasses
import decimal
import functools
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from turnwise.errors import TooLarge
from turnwise.types import Json

WINDOW_BYTES = 2**20
MAX_VALUES = 2**20
"""Most values in one text, each with a comma after it: a prompt of a million token ids passes."""
QUOTE, BACKSLASH, COMMA = 0x22, 0x5C, 0x2C
OPEN, CLOSE = 0x5B, 0x5D
CASE_MASK = 0xDF
Bytes = npt.NDArray[np.uint8]
Positions = npt.NDArray[np.intp]
INT_BITS = 63
"""An integer of more bits may be one that orjson does not encode."""
MAX_DEPTH = 200
"""Deepest nesting of an object in a text; orjson encodes 254 levels."""


def loads(text: bytes | str) -> Any:
    """Decode a JSON text, integers exactly.

    Raises:
        orjson.JSONDecodeError: it is not JSON.
    """
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return orjson.loads(text)  # names the error


def dumps(value: Any, option: int = 0) -> bytes:
    """Encode a value as `orjson.dumps` does, and integers of any length.

    Raises:
        TypeError: it is not of JSON's types.
    """
    try:
        return orjson.dumps(value, option=option)
    except TypeError:
        return orjson.dumps(_with_long_integers(value), option=option)


def _with_long_integers(value: Any) -> Any:
    match value:
        case int() if value.bit_length() > INT_BITS:
            return orjson.Fragment(str(value))
        case dict():
            return {key: _with_long_integers(each) for key, each in value.items()}
        case list():
            return [_with_long_integers(each) for each in value]
        case _ if dataclasses.is_dataclass(value):
            return {field.name: _with_long_integers(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


def unify_numbers(value: Any) -> bool:
    """Replace each whole float inside a decoded value by an integer, so that 5.0, 5 and 50e-1 encode alike.

    A float counts as the shortest decimal that is read as it: so JavaScript and Python write it.

    Returns:
        Whether the value can be encoded: orjson refuses deeper nesting than `MAX_DEPTH`.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for holder in level:
            for key, each in holder.items() if isinstance(holder, dict) else enumerate(holder):
                if isinstance(each, dict | list):
                    deeper.append(each)
                elif isinstance(each, float) and each.is_integer():
                    holder[key] = int(decimal.Decimal(repr(each)))
        if not deeper:
            return True
        level = deeper
    return False


@functools.lru_cache(maxsize=4096)
def json_object(text: str) -> Json | None:
    """Return the object that a text is the JSON of, with unified numbers; None if it is not of one, or nested deep."""
    try:
        decoded = loads(text)
    except orjson.JSONDecodeError:
        return None
    return decoded if isinstance(decoded, dict) and unify_numbers(decoded) else None


def scan(
    raw: bytes,
    max_depth: int,
    max_containers: int,
    max_strings: int | None = None,
    max_string_bytes: int | None = None,
) -> int:
    """Check a JSON text and return its number of strings, keys included; one that is not valid JSON may pass.

    Raises:
        TooLarge: it is nested deeper than `max_depth`, or has more than `max_containers` arrays and objects, or more
            than `max_strings` strings, or a string of more than `max_string_bytes`, or more than `MAX_VALUES` values.
    """
    text = np.frombuffer(raw, np.uint8)
    measured = max_string_bytes is not None and len(text) > max_string_bytes
    state = _State(counts_commas=len(text) > 2 * MAX_VALUES, measures_strings=measured)
    for start in range(0, len(text), WINDOW_BYTES):
        state.feed(text[start : start + WINDOW_BYTES])
        if state.deepest > max_depth:
            raise TooLarge(f"the request body is nested deeper than {max_depth} levels, which is the limit")
        if state.num_containers > max_containers:
            raise TooLarge(
                f"the request body has more than {max_containers} arrays and objects, which is the limit; send less"
            )
        if max_strings is not None and state.num_quotes > 2 * max_strings:
            raise TooLarge(
                f"the request body has more than {max_strings} strings, keys included, which is the limit; send less"
            )
        if max_string_bytes is not None and state.longest_string > max_string_bytes:
            raise TooLarge(
                f"the request body has a string of more than {max_string_bytes} bytes, which is the limit; send less, "
                "or raise `max_json_string_bytes`"
            )
        if state.num_commas > MAX_VALUES:
            raise TooLarge(f"the request body has more than {MAX_VALUES} values, which is the limit; send less")
    return state.num_quotes // 2


class _State:
    """The state of a scan after a window."""

    def __init__(self, *, counts_commas: bool, measures_strings: bool) -> None:
        self._counts_commas = counts_commas
        self._measures_strings = measures_strings
        self.longest_string = 0
        self._num_open = 0
        self.num_commas = 0
        self.deepest = 0
        self.num_containers = 0
        self.num_quotes = 0
        self._depth = 0
        self._is_in_string = False
        self._num_backslashes = 0

    def feed(self, window: Bytes) -> None:
        folded = window & CASE_MASK
        brackets = np.flatnonzero((folded == OPEN) | (folded == CLOSE))
        quotes = self._unescaped_quotes(window)
        self.num_quotes += len(quotes)
        if len(brackets):
            inside = (np.searchsorted(quotes, brackets) + self._is_in_string) & 1
            is_open = folded[brackets[inside == 0]] == OPEN
            if len(is_open):
                depths = self._depth + np.cumsum(np.where(is_open, 1, -1))
                self.deepest = max(self.deepest, int(depths.max()))
                self._depth = int(depths[-1])
                self.num_containers += int(np.count_nonzero(is_open))
        if self._counts_commas:
            commas = np.flatnonzero(window == COMMA)
            inside = (np.searchsorted(quotes, commas) + self._is_in_string) & 1
            self.num_commas += len(commas) - int(np.count_nonzero(inside))
        if self._measures_strings:
            self._measure(quotes, len(window))
        self._is_in_string ^= bool(len(quotes) & 1)

    def _measure(self, quotes: Positions, num_bytes: int) -> None:
        edges = np.concatenate(([-self._num_open - 1], quotes)) if self._is_in_string else quotes
        is_open = bool(len(edges) & 1)
        ends = np.append(edges, num_bytes) if is_open else edges
        lengths = ends[1::2] - ends[::2] - 1
        self.longest_string = max(self.longest_string, int(lengths.max(initial=0)))
        self._num_open = int(lengths[-1]) if is_open else 0

    def _unescaped_quotes(self, window: Bytes) -> Positions:
        quotes, slashes = np.flatnonzero(window == QUOTE), np.flatnonzero(window == BACKSLASH)
        before, self._num_backslashes = self._num_backslashes, 0
        if not len(slashes):
            return quotes[1:] if before & 1 and len(quotes) and quotes[0] == 0 else quotes
        is_start = np.diff(slashes, prepend=-2) != 1
        starts = np.maximum.accumulate(np.where(is_start, slashes, 0))
        # Length of the run of backslashes that ends at each backslash. [number of backslashes]
        runs = slashes - starts + 1 + np.where(starts == 0, before, 0)
        if slashes[-1] == len(window) - 1:
            self._num_backslashes = int(runs[-1])
        at = np.searchsorted(slashes, quotes - 1)
        follows = (at < len(slashes)) & (slashes[np.minimum(at, len(slashes) - 1)] == quotes - 1)
        run = np.where(follows, runs[np.minimum(at, len(slashes) - 1)], np.where(quotes == 0, before, 0))
        unescaped: Positions = quotes[run & 1 == 0]
        return unescaped
