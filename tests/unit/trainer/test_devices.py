"""Devices of `torchrun`, rows that do not fit into memory, and the published weights."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file
from support.trainer_ledger import Rollouts, load_model, make_model, new_ledger, settings_for

from trainer.loop import base
from trainer.loop.workflows import OnPolicyWorkflow
from trainer.parallel import World
from trainer.policy import model as policy_model
from trainer.policy.model import Policy, PolicySpec
from turnwise.store import queries


def test_each_process_of_torchrun_loads_onto_its_own_gpu(tmp_path, model, monkeypatch):
    """The device is resolved after the process joined the world and chose its GPU; the reference goes there too."""
    loaded = []

    class Gpu(torch.nn.Module):
        def to(self, device):
            loaded.append(device)
            raise InterruptedError

    def join():
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        return World()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(base, "join_world", join)
    monkeypatch.setattr(policy_model, "_load", lambda *_: Gpu())
    workflow = OnPolicyWorkflow.build_from_config(
        settings_for(tmp_path, model, total_batches=1, kl_coef=0.1), enable_multi_devices=True
    )
    for policy in (workflow.agent.policy, workflow.agent._reference):
        with pytest.raises(InterruptedError):
            policy.load(0)
        assert policy.mesh_axis == "data"
    workflow.close()
    assert loaded == [torch.device("cuda", 3)] * 2


def small_memory(monkeypatch, most_tokens):
    """Raise an out-of-memory error for rows of more tokens, as a device does."""
    real = Policy.logprobs

    def logprobs(self, row, *rest):
        if len(row.layout.tokens) > most_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, row, *rest)

    monkeypatch.setattr(Policy, "logprobs", logprobs)


@pytest.mark.parametrize("proximal", [False, True])
def test_rows_that_do_not_fit_into_memory_are_split_and_the_weights_are_the_same(
    tmp_path, model, ledger, monkeypatch, caplog, proximal
):
    Rollouts(ledger, load_model(model)).play("a", num_groups=3)
    other = tmp_path / "other"
    other.mkdir()
    twin = new_ledger(other / "ledger.db")
    Rollouts(twin, load_model(model)).play("a", num_groups=3)
    twin.close()
    changes = {"total_batches": 1, "row_tokens": 200, "proximal": proximal}
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


def test_a_group_that_does_not_fit_into_memory_is_refused_and_training_continues(
    tmp_path, model, ledger, monkeypatch, caplog
):
    """Two groups are trained; the one with longer sessions is dropped with its reason, and the trainer continues."""
    caplog.set_level(logging.WARNING)
    Rollouts(ledger, load_model(model)).play("short", num_groups=2)
    Rollouts(ledger, load_model(model), num_turns=8).play("long", num_groups=1)
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
