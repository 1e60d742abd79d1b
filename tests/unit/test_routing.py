"""The experts that an engine returns become a part of their turn, or are refused with the reason."""

import base64
import io

import numpy as np
import pytest

from turnwise.features.experts import RoutingProblem, pack_routing


def in_base64(array: np.ndarray) -> str:
    with io.BytesIO() as saved:
        np.save(saved, array)
        return base64.b64encode(saved.getvalue()).decode()


def routing(experts: list[int]) -> str:
    return in_base64(np.array(experts, np.uint8)[:, None, None])


def packed(experts: list[int], start: int, num_tokens: int) -> bytes:
    return pack_routing(routing(experts), start, num_tokens)


def test_a_turn_stores_the_same_experts_whether_the_engine_returned_those_of_earlier_turns_or_not():
    assert packed([3, 4, 5, 6], 4, 8) == packed([0, 1, 2, 3, 4, 5, 6], 4, 8)


@pytest.mark.parametrize(
    ("encoded", "problem"),
    [
        ("!not base64!", RoutingProblem.NOT_BASE64),
        ("\u00e9", RoutingProblem.NOT_BASE64),
        (base64.b64encode(b"no array").decode(), RoutingProblem.NOT_AN_ARRAY),
        (base64.b64encode(b"PK\x03\x04 an archive").decode(), RoutingProblem.NOT_AN_ARRAY),
        (routing([0, 1, 2])[:160], RoutingProblem.NOT_AN_ARRAY),
        (in_base64(np.zeros((3, 1, 1), np.float32)), RoutingProblem.NOT_AN_ARRAY),
        (in_base64(np.zeros((3, 1), np.uint8)), RoutingProblem.WRONG_SHAPE),
        (routing([0, 1]), RoutingProblem.WRONG_LENGTH),
        (routing([0, 1, 2, 3]), RoutingProblem.WRONG_LENGTH),
    ],
)
def test_experts_that_are_not_those_of_the_calls_tokens_are_not_stored(encoded, problem):
    assert pack_routing(encoded, 0, 4) is problem
