"""Supports in an engine's reply that cannot be those of a token are unknown, and the other tokens keep theirs."""

import base64
import json

import numpy as np
import pytest

from turnwise.engine_plugin.features.supports import FIELD, support_text, to_text
from turnwise.features.supports import as_json, read_supports

BEYOND = f"4{base64.b64encode(np.array([2**31 - 1, 1], '<u4').tobytes()).decode()}"
"""The text of the ids 2**31 - 1 and 2**31."""


@pytest.mark.parametrize(
    "broken",
    [
        {"token_id:3000000000": -0.6931472, "token_id:5": -0.6931472},
        {"token_id:-1": -9999.0, "token_id:5": 0.0},
        {"token_id:five": 0.0},
        {"token_id:²": 0.0},
        {f"token_id:{'9' * 5000}": 0.0},
        {"token_id:5": 1e9},
        {"token_id:5": -0.6931472, "token_id:0": -9999.0},
    ],
)
def test_alternatives_that_are_no_ids_or_no_distribution_are_an_unknown_support(broken):
    encoded = json.dumps({"top_logprobs": [broken, {"token_id:7": 0.0}]}).encode()
    assert as_json(read_supports(encoded)) == [None, [7]]


@pytest.mark.parametrize("broken", [BEYOND, "3AAAA", "1?", "1é", "4AAA=", "x"])
def test_a_text_that_the_plug_in_has_not_written_is_an_unknown_support(broken):
    encoded = json.dumps({FIELD: [broken, to_text(np.array([7, 2**31 - 1], np.int32))]}).encode()
    assert as_json(read_supports(encoded)) == [None, [7, 2**31 - 1]]


def test_a_token_whose_alternatives_another_call_of_the_batch_has_replaced_is_of_unknown_support():
    """The sampled token has the probability a half, and in the place of the others stands an impossible id."""
    ids, half = np.array([5, 7, 3], np.int32), np.log(0.5)
    assert support_text(ids, np.array([half, half, -np.inf], np.float32)) == to_text(np.array([5, 7], np.int32))
    assert support_text(np.array([5, 0, 0], np.int32), np.array([half, -np.inf, -np.inf], np.float32)) == ""
