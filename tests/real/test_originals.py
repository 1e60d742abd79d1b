"""The original classes of Trinity-RFT 0.6.0 and verl 0.9.1 beside Turnwise's, in a separate environment.

`tests/conformance/setup.sh` makes that environment; without it these tests are skipped.
"""

import json
import subprocess
from pathlib import Path

import pytest
from support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".conformance" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="run tests/conformance/setup.sh first")


SYNC = ["StepWiseRewardWorkflow", "RewardPropagationWorkflow"]
KINDS = [*SYNC, *(f"Async{kind}" for kind in SYNC)]
PLANS = {
    "calls in every step": {"calls": [1, 2, 1]},
    "a step without calls": {"calls": [1, 0, 2]},
    "no call at all": {"calls": [0, 0]},
    "a step that stops": {"calls": [1, 1, 1, 1], "stop": 1},
    "two choices a call": {"calls": [1, 1], "n": 2},
}
STREAMING = {"calls": [1, 2], "stream": True}
BREAKING = {"calls": [1, 2, 1], "break": 1}


CASES = [(kind, plan) for kind in KINDS for plan in [*PLANS.values(), BREAKING]] + [(kind, STREAMING) for kind in SYNC]


@pytest.fixture(scope="module")
def compared(shared_proxy):
    program = ROOT / "tests" / "conformance" / "originals.py"
    argv = [PYTHON, program, "compare", shared_proxy.proxy.url, json.dumps(CASES)]
    answer = subprocess.run(argv, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)
    assert answer.returncode == 0, answer.stderr[-3000:]
    return json.loads(answer.stdout.splitlines()[-1])


@pytest.fixture
def pairs(compared):
    return {(kind, json.dumps(plan)): pair for (kind, plan), pair in zip(CASES, compared["trinity"], strict=True)}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_original_and_turnwise_give_the_same_experiences(pairs, kind, plan):
    """Same agent, same model: tokens, logprobs, masks, dtypes, rewards, ids, metrics and order are equal."""
    made = pairs[kind, json.dumps(plan)]
    assert made["original"] == made["ours"]
    expected = sum(plan["calls"][: plan.get("stop", 99) + 1]) * plan.get("n", 1)
    assert len(made["ours"]["experiences"]) == expected


@pytest.mark.parametrize("kind", SYNC)
def test_streams_are_recorded_by_both(pairs, kind):
    made = pairs[kind, json.dumps(STREAMING)]
    assert made["original"] == made["ours"]
    assert len(made["ours"]["experiences"]) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_ends_both_and_turnwise_keeps_the_sampled_turns(pairs, kind):
    """Both raise the agent's own error; the original keeps no turn of the run, the ledger all three."""
    made = pairs[kind, json.dumps(BREAKING)]
    assert made["original"] == made["ours"] == {"failure": "the tool crashed", "experiences": []}
    assert made["stored_steps"] == [0, 1, 1]


@pytest.fixture
def verl(compared):
    return compared["verl"]


LONG = "torch.int64"
REAL = "torch.float32"


def test_a_row_for_each_trajectory_is_made_of_captured_tokens(verl):
    """Steps that extend one another are one row; prompts are cut at the start, responses at the end.

    First row: prompt 1 2, sampled 3, tool's 4 5, sampled 6 7. Second: prompt 1..5 of which 4 fit, 6..12 of which 6 fit.
    """
    batch = verl["trajectory"]
    assert batch["tensors"] == {
        "prompts": {"dtype": LONG, "rows": [[0, 0, 1, 2], [2, 3, 4, 5]]},
        "responses": {"dtype": LONG, "rows": [[3, 4, 5, 6, 7, 0], [6, 7, 8, 9, 10, 11]]},
        "input_ids": {"dtype": LONG, "rows": [[0, 0, 1, 2, 3, 4, 5, 6, 7, 0], [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]]},
        "attention_mask": {"dtype": LONG, "rows": [[0, 0, 1, 1, 1, 1, 1, 1, 1, 0], [1] * 10]},
        "position_ids": {"dtype": LONG, "rows": [[0, 0, 0, 1, 2, 3, 4, 5, 6, 0], list(range(10))]},
        "response_mask": {"dtype": LONG, "rows": [[1, 0, 0, 1, 1, 0], [1] * 6]},
        "traj_rewards": {"dtype": REAL, "rows": [[0, 0, 0, 0, 2.5, 0], [0, 0, 0, 0, 0, 1]]},
        "step_rewards": {"dtype": REAL, "rows": [[0, 0, 0, 0, 2.5, 0], [0, 0, 0, 0, 0, 1]]},
        "rollout_log_probs": {"dtype": REAL, "rows": [[-3, 0, 0, -6, -7, 0], [-6, -7, -8, -9, -10, -11]]},
    }
    assert batch["others"] == {
        "episode_ids": ["a:0", "a:1"],
        "trajectory_ids": ["a_solver", "a_solver"],
        "step_ids": ["a_solver", "a_solver"],
        "step_nums": [1, 1],
        "is_correct": [True, False],
        "termination_reasons": ["env_done", "timeout"],
        "metrics": [{"m": 1}, {}],
        "is_valid": [True, False],
        "is_last_step": [True, True],
        "is_pad_step": [False, False],
    }
    assert batch["num_batch_ids"] == 1
    assert batch["meta"] == {"repeat_counts": [1, 0, 0, 1]}


def test_a_row_for_each_step_has_its_own_reward(verl):
    """Stepwise: each step's prompt, response and reward; the number of steps; which is last."""
    batch = verl["step"]
    assert batch["tensors"]["responses"]["rows"] == [[3, 0, 0, 0, 0, 0], [6, 7, 0, 0, 0, 0], [6, 7, 8, 9, 10, 11]]
    assert batch["tensors"]["step_rewards"]["rows"] == [[0.5, 0, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert batch["tensors"]["traj_rewards"]["rows"][:2] == [[2.5, 0, 0, 0, 0, 0], [0, 2.5, 0, 0, 0, 0]]
    assert batch["others"]["step_ids"] == ["a_solver_step0", "a_solver_step1", "a_solver_step0"]
    assert batch["others"]["step_nums"] == [2, 2, 1]
    assert batch["others"]["is_last_step"] == [False, True, True]
    assert batch["meta"] == {"repeat_counts": [2, 0, 0, 1]}


def test_verls_own_functions_take_the_batch(verl):
    """Repeat counts pair rows with requests, padding and chunks divide, GRPO centres the rollouts of a task.

    Rewards 2.5 and 1: the first is above their mean on its sampled tokens, the second below.
    """
    own = verl["verl"]
    assert own["dummy"] == [0, 3]
    assert (own["padded"], own["chunks"], own["concatenated"]) == ([4, 2], [2, 2], 4)
    assert own["advantage_signs"] == [[1, 0, 0, 1, 1, 0], [-1] * 6]


def test_the_rows_of_a_verl_batch_keep_its_order(verl):
    """Ids a b a: each row is its own task's, where rLLM pairs the second with a's; validation runs are evaluations."""
    batch = verl["executed"]
    assert [episode_id.split(":")[0] for episode_id in batch["others"]["episode_ids"]] == ["a", "b", "a"]
    assert [sum(row) for row in batch["tensors"]["step_rewards"]["rows"]] == [1.0, 2.0, 1.0]
    assert batch["splits"] == ["eval", "eval", "eval"]
    assert batch["meta"]["repeat_counts"] == [1, 1, 1]
