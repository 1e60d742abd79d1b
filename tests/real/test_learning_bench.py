"""The parts of `bench/learning`: its ledger equals the proxy's, and both workflows learn from it."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from proxy.continuation.template_checks import load_chat_template
from trainer.off_policy import ReplayBuffer
from turnwise.demo import trail
from turnwise.demo.small_model import SmallModelSpec, build_small_model
from turnwise.store import policies, queries
from turnwise.store.experiences import SessionFilter
from turnwise.types import Credit, PolicyStatus

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
        sessions, _ = queries.sessions(conn, SessionFilter(), limit=1000)
        turns = {one.session_id: queries.turns(conn, one.tenant, one.session_id)[0] for one in sessions}
    return {session_id: [view.turn for view in views] for session_id, views in turns.items()}


def test_the_ledger_holds_exact_chains(start, model):
    """A turn's prompt is its parent's prompt and sampled reply, followed by the rendering of the new messages."""
    run = start()
    run.play_groups()
    template = load_chat_template(str(model), "string")
    num_continued = 0
    for turns in turns_by_session(run).values():
        num_tokens, parent = 0, None
        for turn in turns:
            assert turn.parent_turn_id == (parent.turn_id if parent else None)
            assert turn.chain_id == turns[0].turn_id
            new = template.render(turn.messages, None if parent else trail.TOOLS, {}, generate=True)
            assert turn.prompt_delta.tolist() == template.tokenise("\n" + new if parent else new)
            assert turn.prompt_length == num_tokens + len(turn.prompt_delta)
            num_tokens, parent = turn.prompt_length + len(turn.token_ids), turn
        num_continued += len(turns) - 1
    assert num_continued > NUM_GROUPS * 8


def test_the_stored_logprobs_are_those_of_the_published_weights(start):
    """Every sampled token matches within 1e-4, for the base model and for the trained version."""
    run = start()
    run.play_groups()
    run.update()
    run.play_groups()
    checked = set()
    with run.db.read() as conn:
        published, _ = policies.list_policies(conn, limit=10)
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


def test_each_update_trains_turns_of_the_version_before_and_its_version_is_served_next(start):
    """This equals a real trainer; each version is published, then active, then retired."""
    run = start()
    run.play_groups()
    staleness = []
    for _ in range(2):
        run.play_groups()
        staleness.append(run.update()["staleness_mean"])
    assert staleness == [0.0, 1.0]
    with run.db.read() as conn:
        published, _ = policies.list_policies(conn, limit=10)
    assert {policy.version: policy.status for policy in published} == {
        0: PolicyStatus.RETIRED,
        1: PolicyStatus.RETIRED,
        2: PolicyStatus.ACTIVE,
    }


def test_imported_sessions_are_right_and_wrong_conversations_in_the_policys_own_format(bench, model, tmp_path):
    """Their replies parse to the same tool calls as sampled ones, they are graded as in a run, and each batch mixes."""
    recipe = bench.recipes.Recipe(
        settings={
            "groups_per_batch": NUM_GROUPS,
            "algorithm": {"name": "chord", "imitation": "dpo", "imported_groups": 4, "mu": 0.5},
        },
        coin=True,
        groups_per_update=NUM_GROUPS,
        num_imported=4,
    )
    run = bench.learner.Run(recipe, 0, model, tmp_path)
    decode = AutoTokenizer.from_pretrained(model).decode
    try:
        with run.db.read() as conn:
            rewards = {each.session_id: each.reward for each in queries.sessions(conn, SessionFilter(), limit=100)[0]}
        imported = turns_by_session(run)
        run.play_groups()
        metrics = run.update()
    finally:
        run.close()
    assert sorted(rewards.values()) == [0.0] * 4 + [1.0] * 4
    for session_id, turns in imported.items():
        records = [json.loads(message["content"]) for turn in turns[1:] for message in turn.messages]
        replies = [bench.in_process.reply_message(decode(turn.token_ids[:-1])) for turn in turns]
        looked_up = [reply["tool_calls"][0]["function"]["arguments"] for reply in replies[:-1]]
        trail_of_bosses = [json.dumps({"name": record["boss"]}) for record in records[:-1] if "boss" in record]
        is_right = looked_up[1:] == trail_of_bosses and replies[-1]["content"] == (
            f'The answer is "{records[-1].get("city")}".' if records else None
        )
        assert is_right == (rewards[session_id] == 1.0)
        assert {turn.chain_id for turn in turns} == {turns[0].turn_id}
    assert metrics["num_imported_sessions"] == 8


def test_replay_trains_on_older_turns_again(start):
    """Three updates over a buffer that keeps every group: at least one group is used twice, and old turns are used."""
    run = start(workflow="off_policy", buffer_groups=64, buffer_min_groups=NUM_GROUPS, wait_seconds=0.0)
    for _ in range(3):
        run.play_groups()
        metrics = run.update()
    entries = ReplayBuffer.entries(run.state.buffer)
    assert run.state.progress.policy_version == 3
    assert max(entry.num_uses for entry in entries) > 1
    assert metrics["staleness_mean"] > 0


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


def test_held_out_sessions_get_true_rewards_and_are_not_trained_on(start):
    """Also with random training rewards: theirs are 0 or 1 by their answers, and no group is claimable."""
    run = start()
    held_out = run.evaluate(16)
    assert held_out * 16 == int(held_out * 16)
    with run.db.read() as conn:
        sessions, _ = queries.sessions(conn, SessionFilter(), limit=100)
    answers = {name: turns[-1].response.get("content") or "" for name, turns in turns_by_session(run).items()}
    for session in sessions:
        index = int(session.task_id.rpartition("-")[2])
        assert session.reward == trail.reward(trail.make_task("eval", index, 0), answers[session.session_id])
        assert session.group_id is None


def test_a_step_has_reward_one_if_it_follows_the_trail(bench):
    """Kim's boss is Ada, whose city is Oslo; each conversation is graded by hand."""
    records = {"Kim": {"boss": "Ada", "friend": "Leo"}, "Ada": {"city": "Oslo"}, "Leo": {"city": "Rome"}}
    task = trail.TrailTask("t", "Follow each boss from Kim. Which city?", records, "Oslo", 2)

    def grade(*replies):
        return bench.learner.step_rewards(task, [bench.in_process.reply_message(reply) for reply in replies])

    def lookup(name):
        return f'<tool_call>\n{{"name": "lookup", "arguments": {{"name": "{name}"}}}}\n</tool_call>'

    oslo, rome = 'The answer is "Oslo".', 'The answer is "Rome".'
    assert grade(lookup("Kim"), lookup("Ada"), oslo) == [1.0, 1.0, 1.0]
    assert grade(lookup("Kim"), lookup("Leo"), rome) == [1.0, 0.0, 0.0]
    assert grade(lookup("Kim"), lookup("Leo"), lookup("Ada"), oslo) == [1.0, 0.0, 1.0, 1.0]
    assert grade(lookup("Kim"), lookup("Kim"), lookup("Ada")) == [1.0, 0.0, 1.0]
    assert grade(lookup("Kim"), lookup("Ada"), lookup("Oslo")) == [1.0, 1.0, 0.0]
    assert grade("<tool_call>\nnonsense</tool_call>") == [0.0]


@pytest.mark.slow
def test_a_run_reports_its_outcome_and_its_counts(bench, model, tmp_path):
    """Two updates cannot have learned anything: the outcome reports this, and its counts are correct."""
    recipe = bench.recipes.Recipe(
        settings={"groups_per_batch": NUM_GROUPS}, coin=True, groups_per_update=NUM_GROUPS, max_updates=2
    )
    outcome = bench.learner.learn("coin", recipe, 0, model, tmp_path, lambda *_: None)
    assert not outcome.passed
    assert outcome.after < bench.learner.GOOD
    assert outcome.num_updates == 2
    assert outcome.num_sessions == 3 * NUM_GROUPS * bench.learner.GROUP_SIZE
    assert outcome.staleness == 0.5


@pytest.mark.parametrize("name", ["grpo", "cispo", "decoupled", pytest.param("gae_head", marks=pytest.mark.slow)])
def test_an_algorithm_learns_the_tiny_task(bench, name, tmp_path):
    """From chance, 0.25, to 0.85 of the tokens right on held-out prompts, in at most twice the usual updates."""
    outcome = bench.tiny.learn_tiny(name, bench.recipes.RECIPES[name], 2, tmp_path, lambda *_: None)
    assert outcome.before < 0.35
    assert outcome.passed
    assert outcome.after >= bench.tiny.ENOUGH
    assert outcome.num_sessions == 64 * (outcome.num_updates + 1)
