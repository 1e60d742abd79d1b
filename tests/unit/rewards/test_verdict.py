import numpy as np
import pytest
import torch

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
        (b"1e-1", 0, [Grade(0.1)]),
        (b"1..3\nok 1 - a\nok 2 - b\n", 0, [Grade(1.0)]),  # a test suite's own format, TAP
        (b".......  [100%]\n7 passed in 0.5s\n[1, 2]\n", 0, [Grade(1.0)]),
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
        (b"1e999", 0, "finite"),
        (b"{broken", 0, "not JSON"),
        (b'{"value": "high"}', 0, "'high'"),
        (b'{"value": true}', 0, "True"),
        (b'{"reward": 1}', 0, "'reward'"),
        (b'{"value": ' + b"7" * 400 + b"}", 0, "finite"),
        (b"7" * 400, 0, "finite"),
        (b'{"value": 1e400}', 0, "finite"),
        (b'{"value": Infinity}', 0, "finite"),
        (b'{"value": 1, "step": ' + b"[" * 100_000 + b"}", 0, "not JSON"),
        (b'{"value": 1, "step": 1.5}', 0, "step.*1.5"),
        (b'{"value": 1, "step": true}', 0, "step.*True"),
        (b'{"value": 1, "turn_id": ["t"]}', 0, "turn_id"),
        (b'{"value": 1, "session_id": {}}', 0, "session_id"),
        (b'{"value": 1, "name": "\\ud83d"}', 0, "name"),  # half of a surrogate pair cannot be sent
    ],
)
def test_a_broken_grader_gives_no_reward(output, status, named):
    with pytest.raises(GraderFailed, match=named):
        read_verdict(output, status)


@pytest.mark.parametrize(
    "output",
    [
        *("Loading weights\n0.0", "0.0\nbye", "0\n1", "score\n 0.5 \n", "0,5", ".5", "5.", "+1", "01", "1_000", "0x10"),
        *("50%", "3/4", "NaN", "-Infinity", "Loading\ninf", "False", "null", "None", "[0.0]", '"0"', "[0]\nx"),
        *('Loading\n{"value": 0.0}', '{"value": 0.0}\nbye', '{"score": 0}\nbye', "\u0660"),
    ],
)
@pytest.mark.parametrize("status", [0, 1])
def test_a_verdict_that_is_not_read_is_a_failure_and_never_a_success(output, status):
    with pytest.raises(GraderFailed, match="not read as a reward"):
        read_verdict(output.encode(), status)


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), torch.tensor(0.5)])
def test_numbers_of_numpy_and_pytorch_are_numbers(number):
    assert as_rewards(number) == as_rewards([number]) == as_rewards({"value": number}) == [Grade(0.5)]


def test_booleans_and_integers_of_numpy_are_truth_values_and_numbers():
    assert as_rewards(np.bool_(True)) == as_rewards(np.True_ & np.True_) == as_rewards(np.int64(1)) == [Grade(1.0)]
    assert as_rewards(np.array([0.5, 0.25])) == [Grade(0.5), Grade(0.25)]
    assert as_rewards({"value": np.int32(1), "step": np.int64(2)}) == [Grade(1.0, step=2)]


@pytest.mark.parametrize("value", [10**400, -(10**400), float("nan"), np.float32("inf"), {"value": 10**400}, 1j, "1"])
def test_what_is_no_finite_number_is_no_reward(value):
    with pytest.raises(GraderFailed):
        as_rewards(value)


def test_a_list_with_more_rewards_than_a_request_takes_is_a_failure_and_not_cut():
    assert len(as_rewards([1.0] * 1000)) == 1000
    with pytest.raises(GraderFailed, match="more than 1000 rewards"):
        as_rewards(1.0 for _ in range(1001))


def test_a_function_may_return_a_number_a_mapping_or_a_list():
    assert as_rewards(None) == []
    assert as_rewards(True) == [Grade(1.0)]
    assert as_rewards([0.5, {"value": 1, "step": 0}]) == [Grade(0.5), Grade(1.0, step=0)]
    with pytest.raises(GraderFailed, match="'good'"):
        as_rewards("good")
