from __future__ import annotations

import pytest

from turnwise.errors import GraderFailed
from turnwise.rewards.grader import Grade, as_rewards, read_verdict


@pytest.mark.parametrize(
    ("output", "status", "rewards"),
    [
        (b"", 0, [Grade(1.0)]),
        (b"", 1, [Grade(0.0)]),
        (b"3 tests passed\n", 0, [Grade(1.0)]),
        (b"1 failed, 2 passed\n", 1, [Grade(0.0)]),
        (b" 0.25\n", 0, [Grade(0.25)]),
        (b"-1", 0, [Grade(-1.0)]),
        (b'{"value": 1, "step": 2}\n\n{"value": 0.5}\n', 0, [Grade(1.0, step=2), Grade(0.5)]),
        (b'{"value": 1, "turn_id": "chatcmpl-1", "name": "style"}', 0, [Grade(1.0, None, "chatcmpl-1", "style")]),
    ],
)
def test_a_grader_answers_with_its_status_a_number_or_lines(output, status, rewards):
    assert read_verdict(output, status) == rewards


@pytest.mark.parametrize(
    ("output", "status", "named"),
    [
        (b"", 2, "exit status 2"),
        (b"Traceback", 137, "exit status 137"),
        (b"1.0", 1, "exit status 1"),
        (b"nan", 0, "finite"),
        (b"{broken", 0, "not JSON"),
        (b'{"value": "high"}', 0, "'high'"),
        (b'{"value": true}', 0, "True"),
        (b'{"reward": 1}', 0, "'reward'"),
    ],
)
def test_a_broken_grader_gives_no_reward(output, status, named):
    with pytest.raises(GraderFailed, match=named):
        read_verdict(output, status)


def test_a_function_may_return_a_number_a_mapping_or_a_list():
    assert as_rewards(None) == []
    assert as_rewards(True) == [Grade(1.0)]
    assert as_rewards([0.5, {"value": 1, "step": 0}]) == [Grade(0.5), Grade(1.0, step=0)]
    with pytest.raises(GraderFailed, match="'good'"):
        as_rewards("good")
