"""Batches as real `verl.DataProto` of verl 0.9.1, in the environment of `tests/conformance/setup.sh`."""

import json
import subprocess
from pathlib import Path

import pytest
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import running_fake_engine

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".conformance" / "bin" / "python"

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="run tests/conformance/setup.sh first")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict:
    directory = tmp_path_factory.mktemp("verl")
    program = Path(__file__).parent / "parts" / "verl_batches.py"
    with (
        running_fake_engine() as engine,
        running_proxy(engine.url, f"sqlite:///{directory}/turnwise.db", directory) as proxy,
    ):
        done = subprocess.run(
            [PYTHON, program, proxy.url], capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
        )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


LONG = "torch.int64"
REAL = "torch.float32"


def test_a_row_for_each_trajectory_is_made_of_captured_tokens(made):
    """Steps that extend one another are one row; prompts are cut at the start, responses at the end.

    First row: prompt 1 2, sampled 3, tool's 4 5, sampled 6 7. Second: prompt 1..5 of which 4 fit, 6..12 of which 6 fit.
    """
    batch = made["trajectory"]
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


def test_a_row_for_each_step_has_its_own_reward(made):
    """Stepwise: each step's prompt, response and reward; the number of steps; which is last."""
    batch = made["step"]
    assert batch["tensors"]["responses"]["rows"] == [[3, 0, 0, 0, 0, 0], [6, 7, 0, 0, 0, 0], [6, 7, 8, 9, 10, 11]]
    assert batch["tensors"]["step_rewards"]["rows"] == [[0.5, 0, 0, 0, 0, 0], [0, 2, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]]
    assert batch["tensors"]["traj_rewards"]["rows"][:2] == [[2.5, 0, 0, 0, 0, 0], [0, 2.5, 0, 0, 0, 0]]
    assert batch["others"]["step_ids"] == ["a_solver_step0", "a_solver_step1", "a_solver_step0"]
    assert batch["others"]["step_nums"] == [2, 2, 1]
    assert batch["others"]["is_last_step"] == [False, True, True]
    assert batch["meta"] == {"repeat_counts": [2, 0, 0, 1]}


def test_verls_own_functions_take_the_batch(made):
    """Repeat counts pair rows with requests, padding and chunks divide, GRPO centres the rollouts of a task.

    Rewards 2.5 and 1: the first is above their mean on its sampled tokens, the second below.
    """
    own = made["verl"]
    assert own["dummy"] == [0, 3]
    assert (own["padded"], own["chunks"], own["concatenated"]) == ([4, 2], [2, 2], 4)
    assert own["advantage_signs"] == [[1, 0, 0, 1, 1, 0], [-1] * 6]


def test_the_rows_of_a_verl_batch_keep_its_order(made):
    """Ids a b a: each row is its own task's, where rLLM pairs the second with a's; validation runs are evaluations."""
    batch = made["executed"]
    assert [episode_id.split(":")[0] for episode_id in batch["others"]["episode_ids"]] == ["a", "b", "a"]
    assert [sum(row) for row in batch["tensors"]["step_rewards"]["rows"]] == [1.0, 2.0, 1.0]
    assert batch["splits"] == ["eval", "eval", "eval"]
    assert batch["meta"]["repeat_counts"] == [1, 1, 1]
