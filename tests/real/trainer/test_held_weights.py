"""The weights that a trainer sends to engines from memory equal those in the version's directory."""

import pytest
import torch
from safetensors.torch import load_file
from support.migrated import new_database
from support.tiny_models import FAMILIES, load_model, make_model
from support.trainer_ledger import Rollouts, settings_for

from trainer.features import Settings
from trainer.features.transfers import Transfers
from trainer.model.model import Policy
from trainer.workflows import OnPolicyWorkflow
from turnwise.features import transfers


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_sent_weights_equal_the_directory_of_the_version_bit_for_bit(tmp_path, family, dtype):
    """Also by name: the experts of a mixture lie in one tensor here, and in one each in a checkpoint."""
    make_model(tmp_path / "model", family, **FAMILIES[family])
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    policy = Policy(Settings(model=str(tmp_path / "model"), device="cpu", dtype=dtype))
    policy.load(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.01)
    state = policy.trained_state()
    policy.save(tmp_path / "written", state)
    written, sent = load_file(tmp_path / "written" / "model.safetensors"), policy.published(state)
    assert sent.keys() == written.keys()
    for name, tensor in written.items():
        assert sent[name].dtype == tensor.dtype == getattr(torch, dtype)
        assert torch.equal(sent[name], tensor)


def server_of(workflow):
    return next(each.server for each in workflow.beside if isinstance(each, Transfers))


def test_a_run_announces_where_its_weights_are_and_withdraws_it_at_its_end(tmp_path):
    model = make_model(tmp_path / "model")
    db = new_database(tmp_path / "ledger.db")
    Rollouts(db, load_model(model)).play("a", num_groups=6)
    settings = settings_for(tmp_path, model, total_batches=2, max_staleness=10, num_threads=1)

    def announced() -> list[str]:
        with db.read() as connection:
            return transfers.weight_urls(connection)

    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.setup(0)
    assert announced() == [server_of(workflow).url]
    workflow.learn(state)
    for version in (1, 2):
        held = server_of(workflow).held.find(version)
        written = load_file(tmp_path / "policies" / f"v{version:06d}" / "model.safetensors")
        assert all(torch.equal(tensor, written[name]) for name, tensor in held.layout.views(held.buffer))
    workflow.close()
    assert announced() == []
    resumed = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    resumed.setup(0)
    assert server_of(resumed).held.find(2).checksum == held.checksum
    assert server_of(resumed).held.find(2).probe == held.probe
    resumed.close()
    db.close()


@pytest.mark.parametrize("changes", [{"kind": "lora"}, {"weight_transfer": False}])
def test_adapters_and_a_trainer_without_transfers_announce_nothing(tmp_path, changes):
    settings = settings_for(tmp_path, make_model(tmp_path / "model"), **changes)
    db = new_database(tmp_path / "ledger.db")
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    workflow.setup(0)
    with db.read() as connection:
        assert transfers.weight_urls(connection) == []
    workflow.close()
    db.close()


def test_a_trainer_computes_even_if_its_engines_do_not_sleep(tmp_path, caplog, monkeypatch):
    """Also an adapter's trainer has an address then; without a proxy nobody answers its wish."""
    model = make_model(tmp_path / "model")
    db = new_database(tmp_path / "ledger.db")
    Rollouts(db, load_model(model)).play("a", num_groups=3)
    settings = settings_for(tmp_path, model, kind="lora", total_batches=1, engine_sleep_level=1)
    monkeypatch.setattr("trainer.features.transfers.server.SLEEP_SECONDS", 0.05)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.learn(workflow.setup(0))
    with db.read() as connection:
        assert transfers.weight_urls(connection) == [server_of(workflow).url]
    workflow.close()
    db.close()
    assert state.progress.policy_version == 1
    assert "no engine was brought to sleep within 0.05 s" in caplog.text
