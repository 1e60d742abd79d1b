"""The original classes of Trinity-RFT 0.6.0 beside Turnwise's, in a separate environment.

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
    return {(kind, json.dumps(plan)): pair for (kind, plan), pair in zip(CASES, compared, strict=True)}


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
