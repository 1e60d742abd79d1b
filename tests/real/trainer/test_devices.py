"""Devices of `torchrun`, rows that do not fit into memory, and the published weights."""

import dataclasses
import logging

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.gloo_worlds import sessions
from support.ledger_samples import groups_by_status
from support.migrated import new_database
from support.tiny_models import load_model, make_model
from support.trainer_ledger import Rollouts, settings_for, train

from trainer.batch.batch import build
from trainer.features import Settings
from trainer.features.devices import Sharded, leave_world
from trainer.features.memory import RECOMPUTED, MemoryLimits, OutOfMemory, SavingAgent, read_limits
from trainer.main import run
from trainer.model.agent import PolicyAgent
from trainer.model.model import Policy
from trainer.workflows import OnPolicyWorkflow
from turnwise.errors import SettingsError
from turnwise.features.page import overview
from turnwise.store.trainer_reports import TrainerState, trainer_statuses


@pytest.mark.parametrize("is_every", [False, True])
def test_gradients_are_reduced_with_the_last_row_of_a_step_only_unless_memory_is_short(
    tmp_path, model, ledger, monkeypatch, is_every
):
    Rollouts(ledger, load_model(model)).play("a", num_groups=1)
    reduced, real = [], torch.Tensor.backward
    settings = settings_for(tmp_path, model, total_batches=1, row_tokens=20, groups_per_batch=1)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.setup(0)
    wanted = [True]
    place = state.policy.place = Sharded()  # as if it were
    place.syncs_every_row = is_every
    state.policy.model.set_requires_gradient_sync = wanted.append

    def backward(self):
        reduced.append(wanted[-1])
        real(self)

    monkeypatch.setattr(torch.Tensor, "backward", backward)
    workflow.learn(state)
    workflow.close()
    assert len(reduced) > 2
    assert reduced == [*[is_every] * (len(reduced) - 1), True]


def small_memory(monkeypatch, most_tokens, most_recomputed=None):
    """Raise an out-of-memory error for rows of more tokens, as a device does; recomputed ones may be longer."""
    real = Policy.outputs

    def outputs(self, inputs):
        most = most_recomputed if self.base.is_gradient_checkpointing and most_recomputed is not None else most_tokens
        if inputs.tokens.shape[1] > most:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return real(self, inputs)

    for check in ("check_repeatable", "measured_alone"):  # their rows are not of the test
        monkeypatch.setattr(f"trainer.model.model.{check}", lambda *_: None)
    monkeypatch.setattr(Policy, "outputs", outputs)


def test_activations_are_recomputed_before_rows_become_shorter_or_a_group_is_left_out(
    tmp_path, model, ledger, monkeypatch, caplog
):
    """Chains of 32 tokens, of which 40 fit if they are recomputed: two more steps, and every group is trained."""
    Rollouts(ledger, load_model(model), num_turns=4).play("a", num_groups=3)
    small_memory(monkeypatch, 10, most_recomputed=40)
    settings = settings_for(tmp_path, model, total_batches=1, row_tokens=200, gradient_checkpointing=False)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.learn(workflow.setup(0))
    workflow.close()
    assert workflow.agent.policy.base.is_gradient_checkpointing
    assert workflow.agent.row_tokens < 200
    assert (state.progress.num_groups, state.progress.num_refused_groups) == (3, 0)
    recomputed, shortened = caplog.text.index(RECOMPUTED), caplog.text.index("rows hold at most")
    assert recomputed < shortened


def test_a_trainer_that_would_leave_out_nearly_all_groups_for_memory_ends_with_an_error_that_is_seen(
    tmp_path, model, ledger, monkeypatch
):
    """Not one of ten groups fits: none is dropped, and doctor, page, readiness and metrics read the error."""
    Rollouts(ledger, load_model(model)).play("a", num_groups=10)
    small_memory(monkeypatch, 10)
    with pytest.raises(SettingsError, match="10 of the last 10 groups do not fit into the device's memory"):
        run(settings_for(tmp_path, model, total_batches=1, groups_per_batch=10))
    with ledger.read() as connection:
        assert overview.count_rows(connection).groups == {"ready": 10}
        (status,) = trainer_statuses(connection)
    assert status.state is TrainerState.DIED


@pytest.mark.parametrize("correction", [None, "tis"])
def test_rows_that_do_not_fit_into_memory_are_split_and_the_weights_are_the_same(
    tmp_path, model, ledger, monkeypatch, caplog, correction
):
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    other = tmp_path / "other"
    other.mkdir()
    twin = new_database(other / "ledger.db")
    Rollouts(twin, load_model(model)).play("a", num_groups=3)
    twin.close()
    changes = {"total_batches": 1, "row_tokens": 200, "algorithm": {"correction": correction}}
    for directory, most_tokens in ((other, 1000), (tmp_path, 40)):
        small_memory(monkeypatch, most_tokens)
        train(settings_for(directory, model, **changes))
        monkeypatch.undo()
    assert "does not fit into the device's memory; rows hold at most" in caplog.text
    expected, cut = (load_file(path / "policies/v000001/model.safetensors") for path in (other, tmp_path))
    for name, value in expected.items():
        torch.testing.assert_close(cut[name], value, atol=1e-5, rtol=0)


def test_a_model_that_leaves_no_memory_for_a_row_ends_the_start_with_advice(tmp_path, model, ledger, monkeypatch):
    small_memory(monkeypatch, 10)
    monkeypatch.setattr(SavingAgent, "_probes_rows", lambda _: True)
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
    Rollouts(ledger, load_model(model)).play("short", num_groups=2)
    Rollouts(ledger, load_model(model), num_turns=8).play("long", num_groups=1)
    small_memory(monkeypatch, 20)
    state = train(settings_for(tmp_path, model, total_batches=1))
    assert state.metrics["num_groups_out_of_memory"] == 1
    assert state.progress.policy_version == 1
    assert groups_by_status(ledger) == {"trained": 2, "dropped": 1}
    assert "group long-0 is not trained: out_of_memory: a row of" in caplog.text


def test_weights_for_engines_are_written_once_and_in_the_precision_of_the_computation(tmp_path):
    """A tied output layer is stored under one name, and bfloat16 halves what engines load."""
    from transformers import AutoModelForCausalLM

    make_model(tmp_path / "model", tie_word_embeddings=True)
    policy = Policy(Settings(model=str(tmp_path / "model"), device="cpu", dtype="bfloat16"))
    policy.load(0)
    (tmp_path / "version").mkdir()
    policy.save(tmp_path / "version", policy.trained_state())
    written = load_file(tmp_path / "version" / "model.safetensors")
    assert "lm_head.weight" not in written
    assert {value.dtype for value in written.values()} == {torch.bfloat16}
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "version", dtype=torch.float32)
    assert torch.equal(again.lm_head.weight, policy.model.lm_head.weight.bfloat16().float())


@pytest.fixture
def gpt_oss(tmp_path):
    """An adapter of random weights, since engines load nothing else; the windows are longer than the texts here."""
    make_model(tmp_path, "GptOss", num_local_experts=4, num_experts_per_tok=2)
    return Settings(model=str(tmp_path), kind="lora", device="cpu")


def test_gpt_oss_is_sharded_although_it_has_no_sdpa(gpt_oss):
    """In a world of one process."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        policy, whole = Policy(gpt_oss), Policy(gpt_oss)
        policy.place = Sharded()
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
    agent = PolicyAgent(policy, Settings(max_logprob_gap=100.0))
    found = sessions()[:2]
    batch = build(found, [np.array([1.0]), np.array([-1.0])], policy_version=0)
    logprobs = agent.logprobs_of(batch, [0, 1])
    alone = policy.next_logprobs(found[0].tokens.tolist())
    places = batch.table.place[batch.tokens_of[0]]
    expected = alone[places - 1, found[0].tokens[places]]
    torch.testing.assert_close(torch.from_numpy(logprobs[batch.tokens_of[0]]), expected, atol=2e-5, rtol=0)
    agent.accumulate_gradient(batch, [0, 1])
    assert all(parameter.grad is not None for parameter in policy.parameters())


def failed(num_tokens, num_units, *, can_checkpoint=False):
    return OutOfMemory(num_tokens, dict.fromkeys(range(num_units)), can_checkpoint=can_checkpoint)


def test_nothing_is_left_out_before_everything_else_was_tried():
    """Activations, then the gradient, then rows; only a chain that is alone in its row bounds the chains."""
    limits = MemoryLimits().after(failed(4096, 1, can_checkpoint=True), is_pairs=False)
    assert limits == MemoryLimits(checkpoints_layers=True)
    limits = limits.after(failed(4096, 1), is_pairs=False)
    assert limits == MemoryLimits(checkpoints_layers=True, syncs_every_row=True)
    limits = limits.after(failed(4096, 3), is_pairs=False)
    assert (limits.row_tokens, limits.chain_tokens) == (2048, None)
    limits = limits.after(failed(2000, 2), is_pairs=False).after(failed(3000, 2), is_pairs=False)
    assert (limits.row_tokens, limits.chain_tokens) == (1000, None)
    assert limits.after(failed(900, 1), is_pairs=False).chain_tokens == 899
    assert limits.after(failed(900, 1), is_pairs=True).chain_tokens == 449


@pytest.mark.parametrize("row_tokens", [64, 1])
def test_after_a_restart_the_row_that_did_not_fit_is_not_computed_again(tmp_path, monkeypatch, row_tokens):
    """No row fits: the fourth start computes shorter ones, or no chain of 15 tokens, and says so in its settings."""
    model = make_model(tmp_path / "model")
    db = new_database(tmp_path / "ledger.db")
    Rollouts(db, load_model(model)).play("a", num_groups=3)
    settings = settings_for(tmp_path, model, row_tokens=row_tokens, total_batches=1, num_threads=1)
    rows = []

    def outputs(_policy, inputs):
        rows.append(inputs.tokens.shape[1])
        raise torch.OutOfMemoryError("CUDA out of memory")

    for check in ("check_repeatable", "measured_alone"):
        monkeypatch.setattr(f"trainer.model.model.{check}", lambda *_: None)
    monkeypatch.setattr(Policy, "outputs", outputs)
    found = []
    for _ in range(3):
        workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
        state = workflow.setup(0)
        found.append((workflow.agent.policy.base.is_gradient_checkpointing, len(rows)))
        workflow.agent.world.size = 2
        with pytest.raises(OutOfMemory):
            workflow.learn(state)
        workflow.agent.world.size = 1
        workflow.close()
    assert found == [(False, 0), (True, 1), (True, 2)]
    tried = MemoryLimits(checkpoints_layers=True, syncs_every_row=True)
    last = {"row_tokens": rows[0] // 2} if row_tokens == 64 else {"chain_tokens": 14}
    assert read_limits(tmp_path / "policies") == dataclasses.replace(tried, **last)
    restarted = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    restarted.setup(0)
    assert restarted.agent.row_tokens == (rows[0] // 2 if row_tokens == 64 else 1)
    assert restarted.config.max_chain_tokens == (None if row_tokens == 64 else 14)
    restarted.close()
    db.close()
