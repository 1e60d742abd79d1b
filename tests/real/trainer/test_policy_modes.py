"""The loss and gradient are the same in each mode of the policy: compiled, checkpointed, in bfloat16, with kernels."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.migrated import new_database
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for

from trainer.batch.batch import Batch, build
from trainer.batch.chain import chain_of
from trainer.features import Settings
from trainer.features.memory import checkpoint_layers
from trainer.features.optimizers import make_optimizer
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from trainer.workflows import OnPolicyWorkflow
from turnwise.store import experiences
from turnwise.store.selection import SessionFilter
from turnwise.types import PolicyKind

TORCHS_OWN = "ignore:.*torch.jit:DeprecationWarning"
"""The compiler's modules emit deprecation warnings."""
WHILE_TRACING = "ignore:The .grad attribute of a Tensor that is not a leaf"
"""The compiler looks at the inputs of a layer, which another layer computed."""
ROW_TOKENS = 40
"""Gives rows of one sequence without a mask, and rows of several sequences with a mask."""


@pytest.fixture(scope="module")
def batch(tmp_path_factory, model) -> Batch:
    db = new_database(tmp_path_factory.mktemp("ledger") / "ledger.db")
    Rollouts(db, load_model(model), num_turns=3).play("a", num_groups=2)
    with db.read() as conn:
        found = list(map(chain_of, experiences.experiences(conn, SessionFilter(), experiences.PER_CHAIN)))
    db.close()
    return build(found, [np.linspace(-1.0, 2.0, len(e.turn_ids)) for e in found], policy_version=0)


def policy_for(model, *, compiled=False, **spec) -> Policy:
    policy = Policy(Settings(model=str(model), device="cpu", **spec))
    policy.compiled = compiled
    policy.load(0)
    return policy


def loss_and_gradient(policy, batch) -> tuple[float, torch.Tensor]:
    agent = PolicyAgent(policy, Settings(algorithm={"entropy_coef": 0.01}, row_tokens=ROW_TOKENS))
    gauges, _ = agent.accumulate_gradient(batch, range(len(batch.experiences)))
    return gauges.read()["loss"], torch.cat([parameter.grad.flatten() for parameter in policy.parameters()])


def count_passes(policy) -> list[None]:
    passes: list[None] = []
    layer = next(module for module in policy.model.modules() if hasattr(module, "self_attn"))
    layer.self_attn.register_forward_hook(lambda *_: passes.append(None))
    return passes


@pytest.mark.parametrize("kind", list(PolicyKind))
def test_gradient_checkpointing_changes_no_number(model, batch, kind):
    """The backward pass computes the layers again; also with LoRA, whose inputs need no gradient otherwise."""
    plain = policy_for(model, kind=kind, lora_rank=4)
    checkpointed = policy_for(model, kind=kind, lora_rank=4)
    checkpoint_layers(checkpointed)
    passes = {policy: count_passes(policy) for policy in (plain, checkpointed)}
    loss, gradient = loss_and_gradient(plain, batch)
    again, gradient_again = loss_and_gradient(checkpointed, batch)
    assert len(passes[checkpointed]) == 2 * len(passes[plain]) > 0
    assert again == pytest.approx(loss, abs=1e-7)
    torch.testing.assert_close(gradient_again, gradient, atol=1e-7, rtol=0)
    assert gradient.abs().sum() > 0


def test_bfloat16_computes_in_bfloat16_and_holds_weights_and_gradients_in_float32(model, batch):
    """Close to float32, and not equal to it: eight bits of mantissa leave about half a percent."""
    loss, gradient = loss_and_gradient(policy_for(model), batch)
    policy = policy_for(model, dtype="bfloat16")
    computed: set[torch.dtype] = set()
    policy.model.model.layers[0].self_attn.q_proj.register_forward_hook(
        lambda _module, _inputs, output: computed.add(output.dtype)
    )
    rounded, rounded_gradient = loss_and_gradient(policy, batch)
    assert computed == {torch.bfloat16}
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.float32}
    assert rounded_gradient.dtype == torch.float32
    assert rounded != loss
    assert rounded == pytest.approx(loss, abs=2e-2)
    similarity = torch.nn.functional.cosine_similarity(rounded_gradient, gradient, dim=0)
    assert similarity > 0.99


@pytest.mark.slow
@pytest.mark.filterwarnings(TORCHS_OWN)
@pytest.mark.filterwarnings(WHILE_TRACING)
def test_a_workflow_with_jit_gives_the_same_weights(tmp_path, model):
    """The whole step, from claim to published version, with and without `enable_jit`."""
    found = {}
    for enable_jit in (False, True):
        directory = tmp_path / str(enable_jit)
        directory.mkdir()
        db = new_database(directory / "ledger.db")
        Rollouts(db, load_model(model)).play("a", num_groups=3)
        db.close()
        settings = settings_for(directory, model, total_batches=1)
        workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=enable_jit)
        assert workflow.agent.policy.compiled is enable_jit
        state = workflow.learn(workflow.setup(0))
        workflow.close()
        found[enable_jit] = (state.metrics["loss"], load_file(directory / "policies/v000001/model.safetensors"))
    assert found[True][0] == pytest.approx(found[False][0], abs=1e-5)
    for name, weight in found[False][1].items():
        torch.testing.assert_close(found[True][1][name], weight, atol=1e-5, rtol=0)


def test_bfloat16_weights_with_float32_masters_train_as_float32_weights_do(model, batch):
    """After 8 steps the masters are within 10 % of the way that float32 weights went, and keep what bfloat16 loses.

    Steps of 1e-5 change few bits of a bfloat16 weight: without masters most of them would be lost.
    """
    start = torch.cat([parameter.detach().flatten() for parameter in policy_for(model).parameters()])
    ends = {}
    for dtype in ("float32", "bfloat16"):
        policy = policy_for(model, dtype="bfloat16", weights_dtype=dtype)
        optimizer = make_optimizer(policy.parameters(), Settings(learning_rate=1e-5))
        learner = PolicyAgent(policy, Settings(max_logprob_gap=100.0))
        for _ in range(8):
            learner.gradient(optimizer, batch, range(len(batch.experiences)))
            learner.step(optimizer)
        weights = policy.parameters()
        assert {weight.dtype for weight in weights} == {getattr(torch, dtype)}
        assert {weight.grad.dtype for weight in weights} == {torch.float32}
        masters = [optimizer.state[weight].get("master", weight) for weight in weights]
        for weight, master in zip(weights, masters, strict=True):
            assert torch.equal(weight, master.to(weight.dtype))
        ends[dtype] = torch.cat([master.detach().flatten() for master in masters])
    rounded = start.bfloat16().float()
    way = (ends["float32"] - start).abs().mean()
    apart = ((ends["bfloat16"] - rounded) - (ends["float32"] - start)).abs().mean()
    assert way > 5e-5
    assert apart < 0.1 * way


def test_an_optimizer_in_host_memory_gives_the_weights_of_torchs_own_and_resumes_in_float32(model, batch, monkeypatch):
    monkeypatch.setattr("trainer.model.optimizer.WEIGHT_DECAY", 0.1)
    ends = []
    for place in ("device", "host"):
        policy = policy_for(model)
        rule = Settings(learning_rate=1e-3, optimizer_state=place)
        optimizer = make_optimizer(policy.parameters(), rule)
        learner = PolicyAgent(policy, Settings(max_logprob_gap=100.0))
        for step in range(4):
            if step == 2:
                saved, optimizer = optimizer.state_dict(), make_optimizer(policy.parameters(), rule)
                optimizer.load_state_dict(saved)
            learner.gradient(optimizer, batch, range(len(batch.experiences)))
            learner.step(optimizer)
        ends.append(torch.cat([parameter.detach().flatten() for parameter in policy.parameters()]))
    torch.testing.assert_close(ends[1], ends[0], atol=1e-6, rtol=0)


def test_a_saved_master_is_not_rounded_to_the_weights_precision():
    weight = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    weight.grad_dtype = torch.float32
    rule = Settings(learning_rate=1e-4)
    first = make_optimizer([weight], rule)
    weight.grad = torch.ones(3)
    first.step()
    master = first.state[weight]["master"]
    assert torch.equal(weight, torch.ones(3, dtype=torch.bfloat16))  # 1 - 1e-4 is 1 in bfloat16
    torch.testing.assert_close(master, torch.full((3,), 1 - 1e-4))
    again = make_optimizer([weight], rule)
    again.load_state_dict(first.state_dict())
    assert again.state[weight]["master"].dtype == torch.float32
    assert torch.equal(again.state[weight]["master"], master)
