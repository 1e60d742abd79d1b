"""The parts of `bench/learning`: its ledger equals the proxy's, and both workflows learn from it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from turnwise.default_models.small_model import SmallModelSpec, build_small_model
from turnwise.store import versions
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import list_sessions
from turnwise.store.turns import read_turns
from turnwise.types import Credit

BENCH = Path(__file__).parents[2] / "bench" / "learning"
NUM_GROUPS = 4
MODULES = ("in_process", "imported", "recipes", "learner", "teacher", "json_server", "tiny")
SPEC = SmallModelSpec(
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_warm_up_steps=120,
    num_conversations_per_step=16,
    learning_rate=6e-3,
)
"""Trained just enough to use the tool format."""


@pytest.fixture(scope="module")
def bench():
    """The benchmark's modules, which import each other by plain names as scripts of one directory."""
    sys.path.insert(0, str(BENCH))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(BENCH))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_small_model(tmp_path_factory.mktemp("learning") / "model", SPEC)


@pytest.fixture
def start(bench, model, tmp_path):
    """Return a function that starts a run of a recipe with small batches; with random rewards every batch trains."""
    runs = []

    def _start(credit=Credit.PROPAGATE, **settings):
        settings |= {"groups_per_batch": NUM_GROUPS}
        recipe = bench.recipes.Recipe(settings=settings, coin=True, credit=credit, groups_per_update=NUM_GROUPS)
        runs.append(bench.learner.Run(recipe, 0, model, tmp_path))
        return runs[-1]

    yield _start
    for run in runs:
        run.close()


def turns_by_session(run):
    with run.db.read() as conn:
        sessions, _ = list_sessions(conn, SessionFilter(), limit=1000)
        turns = {one.session_id: read_turns(conn, one.tenant, one.session_id)[0] for one in sessions}
    return {session_id: [view.turn for view in views] for session_id, views in turns.items()}


def test_the_stored_logprobs_are_those_of_the_published_weights(start):
    """Every sampled token matches within 1e-4, for the base model and for the trained version."""
    run = start()
    run.play_groups()
    run.update()
    run.play_groups()
    checked = set()
    with run.db.read() as conn:
        published, _ = versions.list_versions(conn, limit=10)
    models = {policy.version: AutoModelForCausalLM.from_pretrained(policy.path).eval() for policy in published}
    for turns in turns_by_session(run).values():
        tokens = []
        for turn in turns:
            tokens += turn.prompt_delta.tolist() + turn.token_ids.tolist()
            checked.add(turn.policy_version_first)
            with torch.inference_mode():
                logits = models[turn.policy_version_first](torch.tensor([tokens])).logits[0].float()
            predicted = torch.log_softmax(logits, -1)[turn.prompt_length - 1 : -1]
            expected = predicted.gather(1, torch.tensor(turn.token_ids.tolist())[:, None])[:, 0]
            assert torch.allclose(torch.tensor(turn.logprobs.tolist()), expected, atol=1e-4, rtol=0)
    assert checked == {0, 1}


def test_trained_policies_teach_in_vllms_wire_format(bench, model, tmp_path):
    """Two teachers with the student's own weights, each for half of the tasks: every token is scored, and no KL."""
    recipe = bench.recipes.Recipe(
        settings={"algorithm": {"name": "distillation"}, "groups_per_batch": NUM_GROUPS},
        taught_by=("grpo", "rloo"),
        groups_per_update=NUM_GROUPS,
    )
    with bench.learner.serving_teachers([model, model]) as teachers:
        run = bench.learner.Run(recipe, 0, model, tmp_path, teachers)
        try:
            run.play_groups()
            metrics = run.update()
        finally:
            run.close()
    assert [teacher["tasks"] for teacher in teachers] == ["*[02468]", "*[13579]"]
    assert metrics["num_updates"] > 0
    assert metrics["num_teacher_unscored"] == 0
    assert abs(metrics["teacher_kl"]) < 1e-4
    assert metrics["reward_mean"] == 0.0, "the rewards of training sessions are not used"


@pytest.mark.parametrize("name", ["grpo", "cispo", "decoupled", pytest.param("gae_head", marks=pytest.mark.slow)])
def test_an_algorithm_learns_the_tiny_task(bench, name, tmp_path):
    """From chance, 0.25, to 0.85 of the tokens right on held-out prompts, in at most twice the usual updates."""
    outcome = bench.tiny.learn_tiny(name, bench.recipes.RECIPES[name], 2, tmp_path, lambda *_: None)
    assert outcome.before < 0.35
    assert outcome.passed
    assert outcome.after >= bench.tiny.ENOUGH
    assert outcome.num_sessions == 64 * (outcome.num_updates + 1)
