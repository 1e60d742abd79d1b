"""Devices of `torchrun`, rows that do not fit into memory, and the published weights."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file
from support import trainer_ledger
from support.gloo_worlds import sessions
from support.trainer_ledger import Rollouts, make_model, new_ledger, settings_for

from trainer.build import make_agent
from trainer.learning.batch import build
from trainer.main import _optional_recorders, run
from trainer.parallel import World, leave_world
from trainer.policy.agent import RECOMPUTED, AgentRule, PolicyAgent
from trainer.policy.inputs import ahead
from trainer.policy.loading import allocate, empty_model, load_model
from trainer.policy.memory import MemoryLimits
from trainer.policy.model import Policy, PolicySpec, resolve_device
from trainer.train import OnPolicyWorkflow
from turnwise.errors import SettingsError
from turnwise.store import queries
from turnwise.store.trainer_status import TrainerState, trainer_statuses


def test_each_process_of_torchrun_loads_onto_its_own_gpu(tmp_path, model, monkeypatch):
    """The device is resolved after the process joined the world and chose its GPU."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: chosen[-1] if chosen else 0)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda _: chosen.append(0))
    monkeypatch.setattr(torch.distributed, "get_node_local_rank", lambda: 3)
    workflow = OnPolicyWorkflow.build_from_config(settings_for(tmp_path, model), enable_multi_devices=True)
    workflow.close()
    assert chosen == [0, 3]
    assert resolve_device("auto") == torch.device("cuda", 3)


def test_the_reference_is_loaded_onto_the_gpu_of_its_process_and_sharded_like_the_policy(tmp_path, model, monkeypatch):
    """The device is resolved when the models are loaded, after the process chose its GPU; `meta` stands for that."""
    agent = make_agent(settings_for(tmp_path, model, algorithm={"kl_coef": 0.1}))
    monkeypatch.setattr("trainer.policy.model.resolve_device", lambda _: torch.device("meta"))
    agent.load(0)
    for policy in (agent.policy, agent._reference):
        assert {parameter.device.type for parameter in policy.model.parameters()} == {"meta"}
    assert not any(parameter.requires_grad for parameter in agent._reference.model.parameters())
    agent.shard("data")
    assert (agent.policy.mesh_axis, agent._reference.mesh_axis) == ("data", "data")


def test_the_next_row_is_prepared_while_the_present_one_is_computed():
    prepared, both = [], threading.Event()

    def prepare(item):
        prepared.append((item, threading.current_thread() is threading.main_thread()))
        if len(prepared) == 2:
            both.set()
        return item * 10

    rows = ahead([1, 2, 3], prepare)
    assert next(rows) == (1, 10)
    assert both.wait(60)  # nobody has asked for the second row yet
    assert list(rows) == [(2, 20), (3, 30)]
    assert prepared == [(1, False), (2, False), (3, False)]


def test_an_error_of_a_row_that_is_prepared_ahead_is_raised_where_the_row_is_due():
    def prepare(item):
        if item == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return item

    rows = ahead([1, 2, 3], prepare)
    assert next(rows) == (1, 1)
    with pytest.raises(torch.OutOfMemoryError):
        next(rows)


@pytest.mark.parametrize("is_every", [False, True])
def test_gradients_are_reduced_with_the_last_row_of_a_step_only_unless_memory_is_short(
    tmp_path, model, ledger, monkeypatch, is_every
):
    Rollouts(ledger, trainer_ledger.load_model(model)).play("a", num_groups=1)
    reduced, real = [], torch.Tensor.backward
    settings = settings_for(tmp_path, model, total_batches=1, row_tokens=20, groups_per_batch=1)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.setup(0)
    workflow.agent.save_memory(MemoryLimits(syncs_every_row=is_every))
    wanted = [True]
    state.policy.mesh_axis = "data"  # as if it were sharded
    state.policy.model.set_requires_gradient_sync = wanted.append

    def backward(self):
        reduced.append(wanted[-1])
        real(self)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    workflow.learn(state)
    workflow.close()
    assert len(reduced) > 2
    assert reduced == [*[is_every] * (len(reduced) - 1), True]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_model_without_weights_takes_no_memory_for_them_and_has_the_names_and_buffers_of_the_model(model, kind):
    """A model that several processes shard: only the first process reads the base model."""
    spec = PolicySpec(model=str(model), device="cpu", kind=kind)
    whole, empty = load_model(spec, "sdpa"), empty_model(spec, "sdpa")
    frozen = {name: value.requires_grad for name, value in whole.named_parameters()}
    assert {name: value.requires_grad for name, value in empty.named_parameters()} == frozen
    assert {value.device.type for value in empty.parameters()} == {"meta"}
    allocate(empty, torch.device("cpu"))
    empty.load_state_dict(whole.state_dict())
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(empty(ids).logits, whole(ids).logits)


def small_memory(monkeypatch, most_tokens, most_recomputed=None):
    """Raise an out-of-memory error for rows of more tokens, as a device does; recomputed ones may be longer."""
    real = Policy.logprobs

    def logprobs(self, inputs):
        most = most_recomputed if self.is_checkpointed and most_recomputed is not None else most_tokens
        if inputs.tokens.shape[1] > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(self, inputs)

    monkeypatch.setattr(Policy, "logprobs", logprobs)


def test_activations_are_recomputed_before_rows_become_shorter_or_a_group_is_left_out(
    tmp_path, model, ledger, monkeypatch, caplog
):
    """Chains of 32 tokens, of which 40 fit if they are recomputed: two more steps, and every group is trained."""
    Rollouts(ledger, trainer_ledger.load_model(model), num_turns=4).play("a", num_groups=3)
    small_memory(monkeypatch, 10, most_recomputed=40)
    settings = settings_for(tmp_path, model, total_batches=1, row_tokens=200, gradient_checkpointing=False)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.learn(workflow.setup(0))
    workflow.close()
    assert workflow.agent.policy.is_checkpointed
    assert workflow.agent.row_tokens < 200
    assert (state.progress.num_groups, state.progress.num_refused_groups) == (3, 0)
    recomputed, shortened = caplog.text.index(RECOMPUTED), caplog.text.index("rows hold at most")
    assert recomputed < shortened


def test_a_trainer_that_would_leave_out_nearly_all_groups_for_memory_ends_with_an_error_that_is_seen(
    tmp_path, model, ledger, monkeypatch
):
    """Not one of ten groups fits: none is dropped, and doctor, page, readiness and metrics read the error."""
    Rollouts(ledger, trainer_ledger.load_model(model)).play("a", num_groups=10)
    small_memory(monkeypatch, 10)
    with pytest.raises(SettingsError, match="10 of the last 10 groups do not fit into the device's memory"):
        run(settings_for(tmp_path, model, total_batches=1, groups_per_batch=10))
    with ledger.read() as connection:
        assert queries.counts(connection).groups == {"ready": 10}
        (status,) = trainer_statuses(connection)
    assert status.state is TrainerState.DIED
    assert status.state.needs_attention


@pytest.mark.parametrize("tis_cap", [None, 2.0])
def test_rows_that_do_not_fit_into_memory_are_split_and_the_weights_are_the_same(
    tmp_path, model, ledger, monkeypatch, caplog, tis_cap
):
    Rollouts(ledger, trainer_ledger.load_model(model)).play("a", num_groups=3)
    other = tmp_path / "other"
    other.mkdir()
    twin = new_ledger(other / "ledger.db")
    Rollouts(twin, trainer_ledger.load_model(model)).play("a", num_groups=3)
    twin.close()
    changes = {"total_batches": 1, "row_tokens": 200, "algorithm": {} if tis_cap is None else {"tis_cap": tis_cap}}
    states = []
    for directory, most_tokens in ((other, 1000), (tmp_path, 40)):
        small_memory(monkeypatch, most_tokens)
        workflow = OnPolicyWorkflow.build_from_config(settings_for(directory, model, **changes), enable_jit=False)
        states.append(workflow.learn(workflow.setup(0)))
        workflow.close()
        monkeypatch.undo()
    assert "does not fit into the device's memory; rows hold at most" in caplog.text
    expected, cut = (load_file(path / "policies/v000001/model.safetensors") for path in (other, tmp_path))
    for name, value in expected.items():
        torch.testing.assert_close(cut[name], value, atol=1e-5, rtol=0)


def test_rows_that_fit_are_found_at_the_start(tmp_path, model, ledger, monkeypatch, caplog):
    """200 and 100 tokens do not fit, 50 do: no row of a batch fails after that, and no gradient is left."""
    caplog.set_level(logging.INFO)
    Rollouts(ledger, trainer_ledger.load_model(model)).play("a", num_groups=3)
    small_memory(monkeypatch, 60)
    monkeypatch.setattr(PolicyAgent, "_probes_rows", lambda _: True)
    settings = settings_for(tmp_path, model, total_batches=1, row_tokens=200)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.setup(0)
    assert workflow.agent.row_tokens == 50
    assert all(parameter.grad is None for parameter in workflow.agent.policy.parameters())
    workflow.learn(state)
    workflow.close()
    assert "rows of 50 tokens fit into memory" in caplog.text
    assert "does not fit into the device's memory" not in caplog.text


def test_the_critic_is_computed_and_counted_where_rows_that_fit_are_found(tmp_path, model, ledger, monkeypatch):
    """Its optimizer's moments take 8 bytes a weight too."""
    monkeypatch.setattr(PolicyAgent, "_probes_rows", lambda _: True)
    computed, reserved = [], []
    forward, allocate_bytes = Policy._output, torch.empty
    settings = settings_for(tmp_path, model, row_tokens=32, algorithm="gae")
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    monkeypatch.setattr(Policy, "_output", lambda self, inputs: computed.append(self) or forward(self, inputs))

    def empty(*size, **options):
        if options.get("dtype") is torch.uint8:
            reserved.append(size[0])
        return allocate_bytes(*size, **options)

    monkeypatch.setattr(torch, "empty", empty)
    workflow.setup(0)
    agent = workflow.agent
    workflow.close()
    assert len(computed) == 1
    assert 8 * sum(value.numel() for value in agent.policy.parameters() + agent.critic.parameters()) in reserved
    assert all(value.grad is None for value in agent.critic.parameters())


def test_a_model_that_leaves_no_memory_for_a_row_ends_the_start_with_advice(tmp_path, model, ledger, monkeypatch):
    small_memory(monkeypatch, 10)
    monkeypatch.setattr(PolicyAgent, "_probes_rows", lambda _: True)
    settings = settings_for(tmp_path, model, row_tokens=64)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    with pytest.raises(SettingsError, match="a row of 16 tokens does not fit into the memory of cpu"):
        workflow.setup(0)
    workflow.close()


def test_a_group_that_does_not_fit_into_memory_is_refused_and_training_continues(
    tmp_path, model, ledger, monkeypatch, caplog
):
    """Two groups are trained; the one with longer sessions is dropped with its reason, and the trainer continues."""
    caplog.set_level(logging.WARNING)
    Rollouts(ledger, trainer_ledger.load_model(model)).play("short", num_groups=2)
    Rollouts(ledger, trainer_ledger.load_model(model), num_turns=8).play("long", num_groups=1)
    small_memory(monkeypatch, 20)
    workflow = OnPolicyWorkflow.build_from_config(settings_for(tmp_path, model, total_batches=1), enable_jit=False)
    state = workflow.learn(workflow.setup(0))
    workflow.close()
    assert state.metrics["num_groups_out_of_memory"] == 1
    assert state.progress.policy_version == 1
    with ledger.read() as connection:
        assert queries.counts(connection).groups == {"trained": 2, "dropped": 1}
    assert "group long-0 is not trained: out_of_memory: a row of" in caplog.text


def test_weights_for_engines_are_written_once_and_in_the_precision_of_the_computation(tmp_path):
    """A tied output layer is stored under one name, and bfloat16 halves what engines load."""
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "model", tie_word_embeddings=True)
    policy = Policy(PolicySpec(model=str(tmp_path / "model"), device="cpu", dtype="bfloat16"))
    policy.load(0)
    (tmp_path / "version").mkdir()
    policy.save(tmp_path / "version", policy.trained_state())
    written = load_file(tmp_path / "version" / "model.safetensors")
    assert "lm_head.weight" not in written
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "version", dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, policy.model.lm_head.weight.bfloat16().float())


def test_dropout_is_off(tmp_path):
    make_model(tmp_path, attention_dropout=0.5)
    policy = Policy(PolicySpec(model=str(tmp_path), device="cpu"))
    policy.load(0)
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        assert torch.equal(policy.model(ids).logits, policy.model(ids).logits)


@pytest.fixture
def gpt_oss(tmp_path):
    """Random weights; its windows are longer than the texts here."""
    config = transformers.GptOssConfig(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    transformers.GptOssForCausalLM(config).save_pretrained(tmp_path)
    return PolicySpec(model=str(tmp_path), device="cpu")


def test_gpt_oss_is_sharded_although_it_has_no_sdpa(gpt_oss):
    """In a world of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        policy, whole = Policy(gpt_oss), Policy(gpt_oss)
        policy.mesh_axis = "data"
        policy.load(0)
        whole.load(0)
        expected = whole.trained_state()
        assert all(torch.equal(value, expected[name]) for name, value in policy.trained_state().items())
    finally:
        leave_world()


def test_gpt_oss_without_sdpa_is_trained_on_a_cpu(gpt_oss):
    policy = Policy(gpt_oss)
    policy.load(0)
    assert policy.attention == "eager"
    agent = PolicyAgent(policy, AgentRule(max_logprob_gap=100.0))
    found = sessions()[:2]
    batch = build(found, [np.array([1.0]), np.array([-1.0])], policy_version=0)
    logprobs = agent.logprobs_of(batch, [0, 1])
    alone = policy.next_logprobs(found[0].tokens.tolist())
    places = batch.table.place[batch.tokens_of[0]]
    expected = alone[places - 1, found[0].tokens[places]]
    torch.testing.assert_close(torch.from_numpy(logprobs[batch.tokens_of[0]]), expected, atol=2e-5, rtol=0)
    agent.accumulate_gradient(batch, [0, 1])
    assert all(parameter.grad is not None for parameter in policy.parameters())


def test_processes_wait_for_the_first_one_in_a_gloo_group_without_nccls_time_limit(monkeypatch):
    """Rollouts may take longer than ten minutes; `shares` holds the group of each broadcast."""
    made, shares = [], []

    def new_group(**options):
        made.append(options)
        return f"group {len(made)}"

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(
        torch.distributed, "broadcast_object_list", lambda _, **options: shares.append(options["group"])
    )
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)
    leave_world()  # groups of an earlier world are not reused
    World().share("batch")
    leave_world()
    assert shares == ["group 1"]
    assert all(options["backend"] == "gloo" and options["timeout"].days > 100 for options in made)


@pytest.mark.parametrize(("rank", "names"), [(0, ["ProgressLine", "TensorBoard"]), (1, [])])
def test_only_the_first_process_records(tmp_path, monkeypatch, rank, names):
    monkeypatch.setattr(World, "is_first", property(lambda _: rank == 0))
    monkeypatch.setattr("trainer.main.TensorBoard", type("TensorBoard", (), {"__init__": lambda *_: None}))
    settings = settings_for(tmp_path, tmp_path, progress=True, tensorboard_dir=str(tmp_path / "board"))
    assert [type(recorder).__name__ for recorder in _optional_recorders(settings)] == names
