"""A mixture of experts follows the routing of the engine."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.gloo_worlds import sessions
from support.tiny_models import make_model
from torch.nn import functional

from trainer.batch.batch import build, pack
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from trainer.settings import TrainerSettings
from turnwise.errors import BatchRefused

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
    policy = Policy(TrainerSettings(model=str(directory), device="cpu", **spec))
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
        found.append(dataclasses.replace(one, routed_experts=routing))
    return found


def batch_of(found: list):
    return build(found, [np.array([float(index % 3 - 1)]) for index in range(len(found))], policy_version=0)


def forced_logprobs(policy: Policy, one) -> torch.Tensor:
    """Return the logprobs of one session alone, with each router's choice replaced by hand."""
    model = transformers.AutoModelForCausalLM.from_pretrained(policy.spec.model, dtype=torch.float32)
    for layer, block in enumerate(model.model.layers):
        router = block.mlp.gate
        forced = torch.from_numpy(one.routed_experts[:-1, layer].astype(np.int64))

        def route(hidden, router=router, forced=forced):
            probabilities = functional.linear(hidden, router.weight).softmax(-1)
            chosen = torch.stack([probabilities[token, experts] for token, experts in enumerate(forced)])
            return probabilities.log(), chosen / chosen.sum(-1, keepdim=True), forced

        router.forward = route
    tokens = torch.from_numpy(one.tokens.astype(np.int64))
    with torch.no_grad():
        log_p = model(tokens[None, :-1]).logits[0].log_softmax(-1)
    return log_p.gather(-1, tokens[1:, None])[:, 0]


def test_packed_rows_use_the_experts_of_each_token_as_if_they_were_forced_one_by_one(directory: Path):
    policy = loaded(directory)
    found = routed_sessions(1)
    batch = batch_of(found)
    agent = PolicyAgent(policy, TrainerSettings(row_tokens=128))
    logprobs = torch.from_numpy(agent.logprobs_of(batch, range(len(found))))
    own = torch.from_numpy(
        PolicyAgent(loaded(directory, router_replay=False), agent.rule).logprobs_of(batch, range(len(found)))
    )
    for index, one in enumerate(found):
        rows = torch.from_numpy(batch.tokens_of[index])
        places = torch.from_numpy(batch.table.place[batch.tokens_of[index]])
        torch.testing.assert_close(logprobs[rows], forced_logprobs(policy, one)[places - 1], atol=2e-5, rtol=0)
    assert (logprobs - own).abs().max() > 0.1  # the random routing is another one than the model's


def test_the_gradient_reaches_the_routers_and_is_the_same_with_recomputed_activations(directory: Path):
    gradients = []
    for checkpointing in (False, True):
        policy = loaded(directory, gradient_checkpointing=checkpointing)
        agent = PolicyAgent(policy, TrainerSettings(row_tokens=64, max_logprob_gap=100.0))
        found = routed_sessions(1)
        agent.accumulate_gradient(batch_of(found), range(len(found)))
        gradients.append({name: value.grad for name, value in policy.model.named_parameters()})
    plain, recomputed = gradients
    assert all(plain[f"model.layers.{layer}.mlp.gate.weight"].abs().sum() > 0 for layer in range(LAYERS))
    for name, value in plain.items():
        torch.testing.assert_close(recomputed[name], value, atol=1e-6, rtol=0)


def test_sessions_without_routing_take_the_experts_of_the_trainer(directory: Path):
    found = sessions()
    batch = batch_of(found)
    assert all(row.routing is None for row in pack(batch, range(len(found)), 128))
    rule = TrainerSettings(row_tokens=128)
    with_replay, without = (
        PolicyAgent(loaded(directory, router_replay=replay), rule).logprobs_of(batch, range(len(found)))
        for replay in (True, False)
    )
    assert np.array_equal(with_replay, without)


def test_routing_of_another_model_is_refused(directory: Path):
    found = routed_sessions(1, num_layers=1)
    agent = PolicyAgent(loaded(directory), TrainerSettings())
    with pytest.raises(BatchRefused, match="routed to 2 experts in each of 1 layers"):
        agent.logprobs_of(batch_of(found), range(len(found)))
