"""What a row may hold, over every kind of layer and every attention, against a forward pass of transformers a chain."""

import dataclasses
import functools
import importlib.util

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from support.experience_factory import experience
from support.tiny_models import SIZES, VOCABULARY, load_model, make_model
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from trainer.batch.batch import build
from trainer.batch.forest import dense_mask
from trainer.batch.selection import Pair
from trainer.features import Settings
from trainer.model import inputs, loading
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from turnwise.commands.cli import main
from turnwise.processes.served_model import NO_ENGINE

WINDOWED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
DELTA_NET = {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "partial_rotary_factor": 0.5,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "shared_intermediate_size": 48,
    "layer_types": ["mamba", "attention"],
}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
KINDS = {
    "full": ("Qwen3ForCausalLM", "Qwen3Config", {}),
    "sliding": ("Gemma3ForCausalLM", "Gemma3TextConfig", WINDOWED | {"query_pre_attn_scalar": 8}),
    "sliding with sinks": ("GptOssForCausalLM", "GptOssConfig", WINDOWED | EXPERTS),
    "chunked": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        EXPERTS | {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "no_rope_layers": [1, 0]},
    ),
    "gated delta net": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", DELTA_NET | {"rope_parameters": ROPE}),
    "Mamba": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", MAMBA),
    "short convolution": (
        "Lfm2ForCausalLM",
        "Lfm2Config",
        {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False},
    ),
}
"""Official classes of transformers with each kind of layer, and what their tiny configurations need."""
WITHOUT_SDPA = ("sliding with sinks",)
WITHOUT_FLEX = ("sliding with sinks", "gated delta net")


@pytest.fixture(scope="module", params=KINDS)
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory):
    causal_lm, config, changes = KINDS[kind]
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("model")
    getattr(transformers, causal_lm)(getattr(transformers, config)(**SIZES | changes)).save_pretrained(directory)
    return directory


def alone(reference, tokens):
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    return reference(ids, use_cache=False).logits[0, :-1].float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def chain(reference, session_id, tokens, first_trained):
    with torch.no_grad():
        behaviour = np.concatenate([[0], alone(reference, tokens).numpy()])
    one = experience(session_id=session_id, tokens=tokens, loss_mask=np.arange(len(tokens)) >= first_trained)
    return dataclasses.replace(one, logprobs=np.where(one.loss_mask, behaviour, 0).astype(np.float32))


def branching(reference):
    """Return three chains of one prompt, longer than any window: two sessions, one of them with a branch."""
    draw = functools.partial(np.random.default_rng(0).integers, 1, VOCABULARY)
    prompt, left, right, branch = (draw(size=size) for size in (12, 10, 7, 9))
    return [
        chain(reference, "a", np.concatenate([prompt, left]), 12),
        chain(reference, "a", np.concatenate([prompt, left[:3], branch]), 15),
        chain(reference, "b", np.concatenate([prompt, right]), 12),
    ]


def forest_and_loss(reference):
    """Return a GRPO batch with its algorithm, and its loss of chains computed one by one: −Σ w · A · log π."""
    agent_rule = Settings(algorithm={"name": "grpo"}, row_tokens=512)
    advantages = [np.array([1.0]), np.array([-0.5]), np.array([2.0])]
    batch = build(branching(reference), advantages, policy_version=0)
    weights = torch.from_numpy(agent_rule.algorithm.weights(batch, range(3)) * batch.table.advantages)

    def loss(logprobs):
        return -(weights * logprobs).sum()

    return batch, agent_rule, loss


def pair_and_loss(reference):
    """Return a DPO pair, of which the better session branches, and its loss: −log σ(β (chosen − rejected)) = log 2."""
    agent_rule = Settings(algorithm={"name": "dpo", "reference": "behaviour"})
    chains = branching(reference)
    batch = build(chains, [np.ones(1)] * 3, policy_version=0, pairs=[Pair(0, better) for better in (True, True, False)])
    signs = torch.from_numpy(np.where(batch.table.experience == 2, -1.0, 1.0).astype(np.float32))

    def loss(logprobs):
        margin = (signs * (logprobs - torch.from_numpy(batch.table.behaviour))).sum()
        return -torch.nn.functional.logsigmoid(0.1 * margin)

    return batch, agent_rule, loss


@pytest.fixture(autouse=True)
def _also_models_that_engines_do_not_reload(monkeypatch):
    monkeypatch.setattr(loading, "NOT_RELOADED", ())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("of", [forest_and_loss, pair_and_loss], ids=["GRPO forest", "DPO pair"])
def test_each_chain_has_the_logprobs_and_gradient_that_it_has_alone(kind, model, attention, of):
    """Within 1e-4 nats a token, and a cosine of the gradient of 0.9999."""
    if attention == "sdpa" and kind in WITHOUT_SDPA:
        pytest.skip("transformers has no SDPA for it")
    reference = load_model(model)
    batch, rule, loss = of(reference)
    policy = Policy(Settings(model=str(model), device="cpu", attention=attention))
    policy.load(0)
    gauges, logprobs = PolicyAgent(policy, rule).accumulate_gradient(batch, range(3))

    expected = torch.cat(
        [
            alone(reference, one.tokens)[batch.table.place[tokens] - 1]
            for one, tokens in zip(batch.experiences, batch.tokens_of, strict=True)
        ]
    )
    expected_loss = loss(expected)
    expected_loss.backward()
    np.testing.assert_allclose(logprobs, expected.detach().numpy(), atol=1e-4, rtol=0)
    assert policy.shares_rows == (kind == "full")
    gradient, expected_gradient = (
        torch.cat([torch.zeros_like(p).flatten() if p.grad is None else p.grad.flatten() for p in each.parameters()])
        for each in (policy.model, reference)
    )
    assert float(torch.nn.functional.cosine_similarity(gradient, expected_gradient, dim=0)) > 0.9999
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-4, rtol=1e-3)
    assert gauges.read()["tokens"] == 10 + 9 + 7


def test_a_dry_run_says_what_a_row_of_the_model_may_hold(kind, model):
    printed = CliRunner().invoke(main, ["train", "--dry-run", "--model", str(model)], catch_exceptions=False).output
    expected = "shared by chains" if kind == "full" else "of one chain each, because it has layers of the kind"
    assert f"# rows: {expected}" in printed


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM's own list of architectures is read")
def test_a_dry_run_of_the_trainer_says_what_only_an_engine_here_would_refuse(tmp_path):
    """The engine may run on another machine, or with --model-impl transformers."""
    make_model(tmp_path, "StableLm")
    options = ["train", "--dry-run", "--kind", "lora", "--model", str(tmp_path)]
    printed = CliRunner().invoke(main, options, catch_exceptions=False)
    assert printed.exit_code == 0
    assert (
        f"# {NO_ENGINE}: the model '{tmp_path}' (StableLmForCausalLM) is of an architecture of which" in printed.output
    )


def uncompiled(*arguments, training, **options):
    return flex_attention(*arguments, **options)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("of", [forest_and_loss, pair_and_loss], ids=["GRPO forest", "DPO pair"])
def test_each_chain_has_the_logprobs_that_it_has_alone_under_flex_attention(kind, model, monkeypatch, of):
    """FlexAttention has no backward on a CPU; it is not compiled here."""
    if kind in WITHOUT_FLEX:
        pytest.skip("transformers has no FlexAttention for it on a CPU")
    monkeypatch.setattr(transformers.integrations.flex_attention, "compile_friendly_flex_attention", uncompiled)
    masks = transformers.masking_utils
    monkeypatch.setattr(masks, "create_block_mask", lambda **kw: create_block_mask(**kw | {"_compile": False}))
    reference = load_model(model)
    batch, rule, _ = of(reference)
    policy = Policy(Settings(model=str(model), device="cpu", attention="flex_attention"))
    policy.load(0)
    logprobs = PolicyAgent(policy, rule).logprobs_of(batch, range(3))
    np.testing.assert_allclose(logprobs, batch.table.behaviour, atol=1e-4, rtol=0)
    assert policy.shares_rows == (kind == "full")


def test_an_attention_that_misreads_the_mask_is_found_at_load_and_named(tmp_path, monkeypatch, caplog):
    """Eager attention adds its mask, so one of True and False hides nothing: each chain then has a row of its own."""
    make_model(tmp_path, "Llama", vocab_size=VOCABULARY)
    monkeypatch.setattr(inputs, "_mask", lambda layout, _attention, device: dense_mask(layout, device)[None, None])
    reference = load_model(tmp_path)
    batch, rule, _ = pair_and_loss(reference)
    policy = Policy(Settings(model=str(tmp_path), device="cpu", attention="eager"))
    policy.load(0)
    assert not policy.shares_rows
    assert "attention='eager' does not keep chains apart: packed rows differ from a row a chain by" in caplog.text
    logprobs = PolicyAgent(policy, rule).logprobs_of(batch, range(3))
    np.testing.assert_allclose(logprobs, batch.table.behaviour, atol=1e-4, rtol=0)


LOGITS_CHANGED = {
    "soft cap": ("Gemma2", {"final_logit_softcapping": 30.0, "initializer_range": 0.02}),
    "soft cap of exactly 1": ("Gemma2", {"final_logit_softcapping": 1.0}),
    "scale": ("Cohere", {"logit_scale": 0.0625}),
    "divisor": ("Granite", {"logits_scaling": 4.0}),
    "padded vocabulary": ("Llama", {}),
    "bias": ("Phi", {}),
}


@pytest.mark.parametrize("name", LOGITS_CHANGED)
def test_a_model_that_changes_its_logits_behind_the_output_layer_keeps_its_own(tmp_path, monkeypatch, name):
    """Whatever the change is called. A cap of 30 is seen although no logit of this model is near it."""
    family, changes = LOGITS_CHANGED[name]
    make_model(tmp_path, family, vocab_size=VOCABULARY, **changes)
    if name == "padded vocabulary":
        cut_logits(monkeypatch, transformers.LlamaForCausalLM, VOCABULARY - 3)
    policy = Policy(Settings(model=str(tmp_path), device="cpu"))
    policy.load(0)
    assert policy.head is None
    reference = load_model(tmp_path)
    tokens = np.random.default_rng(0).integers(1, VOCABULARY - 3, 20)
    batch = build([chain(reference, "a", tokens, 5)], [np.ones(1)], policy_version=0)
    logprobs = PolicyAgent(policy, Settings(algorithm={"name": "grpo"})).logprobs_of(batch, [0])
    np.testing.assert_allclose(logprobs, batch.table.behaviour, atol=1e-4, rtol=0)


def cut_logits(monkeypatch, causal_lm, size):
    """Let a class of transformers leave out the last columns of its output layer, as models do that pad it."""
    whole = causal_lm.forward

    @functools.wraps(whole)
    def forward(self, *arguments, **options):
        output = whole(self, *arguments, **options)
        output.logits = output.logits[..., :size]
        return output

    monkeypatch.setattr(causal_lm, "forward", forward)


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_a_plain_output_layer_is_computed_chunk_by_chunk(tmp_path, family):
    """Also one that a configuration names a cap for and that has none."""
    make_model(tmp_path, family, vocab_size=VOCABULARY, final_logit_softcapping=None)
    policy = Policy(Settings(model=str(tmp_path), device="cpu"))
    policy.load(0)
    assert policy.head is not None
