"""The trainer without any feature: it claims, trains, publishes and acknowledges, and says what it cannot compute."""

import torch
from safetensors.torch import load_file
from support.tiny_models import load_model
from support.trainer_ledger import Rollouts, settings_for, train_policies

from trainer.batch.chain import PROCESSED
from trainer.train import Features
from turnwise.store import updates, versions
from turnwise.types import PolicyStatus


def test_it_claims_trains_publishes_and_acknowledges_without_a_feature(tmp_path, model, ledger):
    Rollouts(ledger, load_model(model)).play("a", num_groups=6)
    train_policies(settings_for(tmp_path, model, total_batches=2, weight_transfer=False), features=Features())
    with ledger.read() as conn:
        last = updates.last_update(conn)
        version = versions.get_version(conn, 2)
    assert (last.policy_version, last.num_groups > 0) == (2, True)
    assert version.status is PolicyStatus.PUBLISHED
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "policies" / "v000002"))
    assert any(not torch.equal(after[name], value) for name, value in before.items())


def test_what_only_a_feature_computes_is_refused_by_its_name(tmp_path, model, ledger):
    """One group for each parameter that changes logits in another way than a temperature does."""
    asked = {"top_k": 8, "repetition_penalty": 1.2, "logit_bias": {"3": 1.0}}
    for name, value in asked.items():
        Rollouts(ledger, load_model(model), sampling={name: value}).play(name, num_groups=1)
    states = train_policies(settings_for(tmp_path, model, total_batches=1, weight_transfer=False), features=Features())
    metrics = states[0].metrics
    assert {"repetition_penalty", "logit_bias"} <= PROCESSED.keys()
    assert (states[0].progress.policy_version, metrics["num_refused_groups"]) == (0, 3)
    assert metrics["num_tokens_left_out_no_trainable_turn"] == metrics["num_tokens_sampled"]
