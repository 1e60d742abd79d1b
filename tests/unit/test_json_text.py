"""The scan of a JSON text before decoding, compared with the decoded value; numbers of any size and spelling."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnwise import json_text
from turnwise.errors import TooLarge
from turnwise.json_text import dumps, json_object, loads, scan

TEXTS = st.text(alphabet='[]{}"\\\\aé,:', max_size=12)
VALUES = st.recursive(
    st.none() | st.integers(-5, 5) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=25,
)


def count_strings(value: Any) -> int:
    if isinstance(value, dict):
        return len(value) + sum(map(count_strings, value.values()))
    return sum(map(count_strings, value)) if isinstance(value, list) else int(isinstance(value, str))


def longest_string(value: Any) -> int:
    """Return the bytes of the longest string as it is encoded in JSON, keys included."""
    if isinstance(value, dict):
        return max(map(longest_string, [*value, *value.values()]), default=0)
    if isinstance(value, list):
        return max(map(longest_string, value), default=0)
    return len(orjson.dumps(value)) - 2 if isinstance(value, str) else 0


def measure(value: Any) -> tuple[int, int]:
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [measure(child) for child in (value.values() if isinstance(value, dict) else value)]
    return 1 + max((depth for depth, _ in inner), default=0), 1 + sum(count for _, count in inner)


@given(value=VALUES, window=st.integers(1, 40))
def test_the_limits_are_exact_for_any_strings_and_any_window_boundary(value: Any, window: int):
    depth, count = measure(value)
    raw = orjson.dumps(value)
    before, json_text.WINDOW_BYTES = json_text.WINDOW_BYTES, window
    try:
        num_strings = count_strings(value)
        longest = longest_string(value)
        scan(raw, depth, count, num_strings, longest)
        if longest:
            with pytest.raises(TooLarge, match=f"a string of more than {longest - 1} bytes"):
                scan(raw, depth, count, num_strings, longest - 1)
        assert scan(raw, depth, count, num_strings) == num_strings
        if num_strings:
            with pytest.raises(TooLarge, match="strings, keys included"):
                scan(raw, depth, count, num_strings - 1)
        if depth:
            with pytest.raises(TooLarge, match="nested deeper"):
                scan(raw, depth - 1, count)
            with pytest.raises(TooLarge, match="arrays and objects"):
                scan(raw, depth, count - 1)
    finally:
        json_text.WINDOW_BYTES = before


def test_a_text_that_is_not_json_is_left_to_the_parser():
    for raw in (b"", b"]]]", b'"', b'\\"[', b'"\\'):
        scan(raw, 3, 3)


@pytest.mark.parametrize("window", [7, 2**20])
def test_more_values_than_the_limit_are_refused_without_being_decoded(window, monkeypatch):
    """[1,1,1,1] has three commas; those in a string do not count, also where a window ends within the string."""
    monkeypatch.setattr(json_text, "WINDOW_BYTES", window)
    monkeypatch.setattr(json_text, "MAX_VALUES", 3)
    scan(b'[1,1,1,",,,,,,,,"]', 3, 3)
    with pytest.raises(TooLarge, match="more than 3 values"):
        scan(b'[1,1,1,",,,,,,,,",1]', 3, 3)


NUMBERS = st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
JSON_VALUES = st.recursive(NUMBERS | TEXTS, lambda inner: st.lists(inner) | st.dictionaries(TEXTS, inner), max_leaves=9)


@given(JSON_VALUES)
def test_a_value_with_integers_of_any_length_is_the_same_after_encoding_and_decoding(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert json.loads(dumps(value)) == value


@given(st.dictionaries(TEXTS, JSON_VALUES))
def test_unified_numbers_are_equal_numbers(value: Any) -> None:
    unified = json_object(dumps(value).decode())
    assert unified is not None
    assert dumps(unified) == dumps(json_object(dumps(unified).decode()))
    assert json.loads(dumps(unified), parse_int=float) == json.loads(dumps(value), parse_int=float)


def test_numbers_of_other_spellings_are_unified():
    """The shortest decimal that is read as the float counts, so a long float equals what JavaScript makes of it."""
    spelled = '{"a": 5.0, "b": [1e2, {"c": -0.0}], "d": 18446744073709551617.0, "e": 0.10}'
    assert json_object(spelled) == {"a": 5, "b": [100, {"c": 0}], "d": 18446744073709552000, "e": 0.1}
    assert dumps(json_object(spelled)) == b'{"a":5,"b":[100,{"c":0}],"d":18446744073709552000,"e":0.1}'
    assert json_object('{"a": ' + "[" * 300 + "]" * 300 + "}") is None
    assert json_object("[1]") is None
