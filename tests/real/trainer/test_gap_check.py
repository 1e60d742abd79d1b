"""What the trainer compares with the engine: each batch's logprobs, and the experts of each token."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.gloo_worlds import sessions
from support.ledger_samples import groups_by_status
from support.migrated import new_database
from support.tiny_models import load_model, make_model
from support.trainer_ledger import Rollouts, settings_for, train
from torch.nn import functional

from trainer.batch.batch import build
from trainer.features import FEATURES, Settings
from trainer.features import gap as gap_check
from trainer.features.experts import Experts
from trainer.features.memory import checkpoint_layers
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from turnwise.errors import EngineDisagrees
from turnwise.features.experts import EXPERTS as ROUTING
from turnwise.features.page.updates import list_updates
from turnwise.store import rewards
from turnwise.types import Reward


def train_on(directory, model, **changes):
    """Train until the configured end; return the state."""
    return train(settings_for(directory, model, **({"max_versions_in_flight": None, "learning_rate": 3e-4} | changes)))


def play_stale(directory, model, *, version=1, gap=0.0, num_groups=3):
    """Make versions 1 and 2, and a ledger with groups of an older one; `gap` is the engine's error in the last one."""
    directory.mkdir()
    ledger = new_database(directory / "ledger.db")
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    train_on(directory, model, total_batches=2)
    sampler = load_model(model if version == 0 else directory / "policies" / f"v{version:06d}")
    rollouts = Rollouts(ledger, sampler, version=version)
    rollouts.play("b", num_groups=num_groups - 1, seed=1)
    dataclasses.replace(rollouts, gap=gap).play("c", num_groups=1, seed=2)
    return ledger


@pytest.mark.parametrize("num_minibatches", [1, 3])
def test_a_group_of_constrained_sampling_is_refused_and_the_plain_ones_beside_it_are_trained(
    tmp_path, model, ledger, num_minibatches
):
    """A grammar's logprobs differ by 10 nats. The weights are those of a batch without that group."""
    plain = Rollouts(ledger, load_model(model))
    plain.play("plain", num_groups=2)
    dataclasses.replace(plain, gap=10.0).play("constrained", num_groups=1, seed=3)
    state = train_on(tmp_path, model, total_batches=1, num_minibatches=num_minibatches)
    assert state.progress.policy_version == 1
    assert groups_by_status(ledger) == {"trained": 2, "dropped": 1}
    assert (state.metrics["num_gap_refused_groups"], state.metrics["num_sessions"]) == (1, 12)
    assert state.metrics["logprob_gap"] < 1e-4 + (num_minibatches > 1)
    if num_minibatches > 1:
        return
    twin = tmp_path / "twin"
    twin.mkdir()
    other = new_database(twin / "ledger.db")
    Rollouts(other, load_model(model)).play("plain", num_groups=2)
    train_on(twin, model, total_batches=1, groups_per_batch=2)
    other.close()
    expected, found = (load_file(one / "policies/v000001/model.safetensors") for one in (twin, tmp_path))
    for name, value in expected.items():  # rows are packed in another order
        torch.testing.assert_close(found[name], value, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "planted",
    [
        {"sampling": {"top_k": 6}, "lost": 2},
        {"sampling": {"top_k": 6, "repetition_penalty": 1.5}, "used": {"top_k": 6}},
        {"sampling": {"repetition_penalty": 2.0}, "window": 1},
        {"sampling": {"presence_penalty": 2.0, "frequency_penalty": 1.0}, "window": 1},
        {"sampling": {"logit_bias": {"7": 4.0}}, "used": {}},
        {"sampling": {}, "used": {"top_k": 6}},
    ],
    ids=["support", "truncated_penalty", "repetition_window", "penalty_window", "bias", "hidden_truncation"],
)
def test_a_group_that_was_sampled_otherwise_than_is_stored_is_refused(tmp_path, model, ledger, planted):
    """The groups beside it were sampled in the same way, and as is stored; they are trained without a gap."""
    honest = Rollouts(ledger, load_model(model), sampling=planted["sampling"], sampled=8)
    honest.play("honest", num_groups=2)
    dataclasses.replace(honest, **planted).play("planted", num_groups=1, seed=3)
    state = train_on(tmp_path, model, total_batches=1, num_minibatches=1)
    assert groups_by_status(ledger) == {"trained": 2, "dropped": 1}
    assert state.metrics["num_gap_refused_groups"] == 1
    assert state.metrics["logprob_gap_max"] < 1e-5


@pytest.mark.parametrize("version", [0, 1])
def test_a_stale_group_is_refused_under_the_version_that_sampled_it_and_the_weights_are_put_back(
    tmp_path, model, version
):
    """An error of 0.5 nats is within what a policy may move, so only the sampling version's own weights show it."""
    ledger = play_stale(tmp_path / "run", model, version=version, gap=0.5)
    state = train_on(tmp_path / "run", model, total_batches=3)
    assert state.progress.policy_version == 3
    assert groups_by_status(ledger) == {"trained": 8, "dropped": 1}
    assert state.metrics["logprob_gap"] < 1e-5
    ledger.close()


def test_the_comparison_under_older_weights_changes_no_bit_of_the_training(tmp_path, model, monkeypatch):
    versions = []
    for name in ("with", "without"):
        play_stale(tmp_path / name, model).close()
        if name == "without":
            monkeypatch.setattr(gap_check.GapCheck, "_sample", lambda *_: [])
        state = train_on(tmp_path / name, model, total_batches=3)
        versions.append(load_file(tmp_path / name / "policies" / "v000003" / "model.safetensors"))
        coverage = state.metrics["logprob_gap_coverage"]
        assert coverage == (1.0 if name == "with" else 0.0)
        assert (state.metrics["logprob_gap"] < 1e-5) == (name == "with")
    assert all(torch.equal(value, versions[1][name]) for name, value in versions[0].items())


def test_each_batch_has_a_gap_also_between_two_comparisons(tmp_path, model):
    """Version 1 sampled two more batches: the second one is compared with the present weights alone."""
    ledger = play_stale(tmp_path / "run", model, num_groups=6)
    train_on(tmp_path / "run", model, total_batches=4, groups_per_batch=3)
    with ledger.read() as conn:
        newest, before, *_ = [record.metrics for record in list_updates(conn)[0]]
    assert (before["logprob_gap_coverage"], newest["logprob_gap_coverage"]) == (1.0, 0.0)
    assert before["logprob_gap"] < 1e-5 < newest["logprob_gap"] < 1
    ledger.close()


def test_training_stops_if_nearly_all_groups_differ_and_keeps_the_last_ones(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model), gap=0.5).play("a", num_groups=12)
    with pytest.raises(EngineDisagrees, match=r"12 of the last 12 groups .* Check that the engine serves the weights"):
        train_on(tmp_path, model, total_batches=1, groups_per_batch=12)
    assert groups_by_status(ledger).get("dropped", 0) == 0
    assert not (tmp_path / "policies" / "v000001").exists()


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "reinforce_plus_plus"])
def test_a_reward_of_1e40_leaves_out_its_group_and_no_optimizer_step(tmp_path, model, ledger, name):
    rollouts = Rollouts(ledger, load_model(model))
    rollouts.play("plain", num_groups=2)
    rollouts.play("huge", num_groups=1, seed=3)
    with ledger.write() as conn:
        rewards.add_rewards(conn, [Reward(session_id="huge-0-1", name="profit", value=1.0)])
    state = train_on(tmp_path, model, total_batches=1, algorithm=name, reward_weights={"profit": 1e40})
    assert (state.metrics["num_skipped_updates"], state.metrics["num_sessions"]) == (0, 8)
    assert groups_by_status(ledger) == {"trained": 2, "dropped": 1}


LAYERS, EXPERTS, CHOSEN = 2, 6, 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(
        tmp_path_factory.mktemp("moe"),
        "Qwen3Moe",
        num_hidden_layers=LAYERS,
        moe_intermediate_size=16,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        initializer_range=0.3,
    )


def loaded(directory: Path, **spec: object) -> Policy:
    policy = Policy(Settings(model=str(directory), device="cpu", **spec), FEATURES.terms)
    policy.load(0)
    return policy


def routed_sessions(seed: int, num_layers: int = LAYERS) -> list:
    """Return sessions whose tokens were routed at random; equal prefixes alike, as one engine does."""
    experts: dict[tuple[int, ...], np.ndarray] = {}
    rng = np.random.default_rng(seed)
    found = []
    for one in sessions():
        routing = np.full((len(one.tokens), num_layers, CHOSEN), -1, np.int16)
        for place in range(len(one.tokens) - 1):
            drawn = [rng.permutation(EXPERTS)[:CHOSEN] for _ in range(num_layers)]
            routing[place] = experts.setdefault(tuple(one.tokens[: place + 1].tolist()), np.array(drawn))
        found.append(dataclasses.replace(one, parts={ROUTING: routing}))
    return found


def batch_of(found: list):
    return build(found, [np.array([float(index % 3 - 1)]) for index in range(len(found))], policy_version=0)


def forced_logprobs(policy: Policy, one) -> torch.Tensor:
    """Return the logprobs of one session alone, with each router's choice replaced by hand."""
    model = transformers.AutoModelForCausalLM.from_pretrained(policy.settings.model, dtype=torch.float32)
    for layer, block in enumerate(model.model.layers):
        router = block.mlp.gate
        forced = torch.from_numpy(one.parts[ROUTING][:-1, layer].astype(np.int64))

        def route(hidden, router=router, forced=forced):
            probabilities = functional.linear(hidden, router.weight).softmax(-1)
            chosen = torch.stack([probabilities[token, experts] for token, experts in enumerate(forced)])
            return probabilities.log(), chosen / chosen.sum(-1, keepdim=True), forced

        router.forward = route
    tokens = torch.from_numpy(one.tokens.astype(np.int64))
    with torch.no_grad():
        log_p = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    return log_p.gather(-1, tokens[1:, None])[:, 0]


def test_packed_rows_use_the_experts_of_each_token_as_if_they_were_forced_one_by_one(directory):
    policy = loaded(directory)
    found = routed_sessions(1)
    batch = batch_of(found)
    agent = PolicyAgent(policy, Settings(row_tokens=128))
    logprobs = torch.from_numpy(agent.logprobs_of(batch, range(len(found))))
    own = torch.from_numpy(
        PolicyAgent(loaded(directory, router_replay=False), agent.settings).logprobs_of(batch, range(len(found)))
    )
    for index, one in enumerate(found):
        rows = torch.from_numpy(batch.tokens_of[index])
        places = torch.from_numpy(batch.table.place[batch.tokens_of[index]])
        torch.testing.assert_close(logprobs[rows], forced_logprobs(policy, one)[places - 1], atol=2e-5, rtol=0)
    assert (logprobs - own).abs().max() > 0.1  # the random routing is another one than the model's


def test_the_gradient_reaches_the_routers_and_is_the_same_with_recomputed_activations(directory):
    gradients = []
    for checkpointing in (False, True):
        policy = loaded(directory)
        if checkpointing:
            checkpoint_layers(policy)
        agent = PolicyAgent(policy, Settings(row_tokens=64, max_logprob_gap=100.0))
        found = routed_sessions(1)
        agent.accumulate_gradient(batch_of(found), range(len(found)))
        gradients.append({name: value.grad for name, value in policy.model.named_parameters()})
    plain, recomputed = gradients
    assert all(plain[f"model.layers.{layer}.mlp.gate.weight"].abs().sum() > 0 for layer in range(LAYERS))
    for name, value in plain.items():
        torch.testing.assert_close(recomputed[name], value, atol=1e-6, rtol=0)


def test_sessions_without_routing_take_the_experts_of_the_trainer(directory):
    found = sessions()
    batch = batch_of(found)
    rule = Settings(row_tokens=128)
    replaying, own = (PolicyAgent(loaded(directory, router_replay=replay), rule) for replay in (True, False))
    assert all(Experts.name not in row.parts for row in replaying.rows(batch, range(len(found))))
    with_replay, without = (agent.logprobs_of(batch, range(len(found))) for agent in (replaying, own))
    assert np.array_equal(with_replay, without)
