"""An adapter merged into its base model, and uploaded."""

import sys
import types

import pytest
import torch
from safetensors import safe_open
from support.commands import invoke
from support.tiny_models import load_model, make_model, pack_integers

from trainer.features import Settings
from trainer.model.model import Policy
from trainer.publish.merge import merge_adapter
from turnwise.default_models.small_model import SmallModelSpec, build_small_model
from turnwise.version_directory import write_manifest


def written_version(directory, model, *targets):
    """Write an adapter with random weights; return its directory, and the policy."""
    policy = Policy(Settings(model=str(model), device="cpu", kind="lora", lora_rank=4, lora_targets=targets))
    policy.load(0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.normal_(std=0.1)
    directory.mkdir()
    policy.save(directory, policy.trained_state())
    write_manifest(directory, {"version": 7, "kind": "lora", "base_model": str(model)})
    return directory, policy


@pytest.fixture
def version(tmp_path, model):
    return written_version(tmp_path / "v000007", model, "q_proj", "down_proj")


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
def test_a_merged_head_leaves_the_embeddings_to_which_it_was_tied(tmp_path):
    """The adapter changes the head alone, so the merged model has a head of its own."""
    model = build_small_model(tmp_path / "tied", SmallModelSpec(num_warm_up_steps=1, num_layers=1, tied=True))
    directory, policy = written_version(tmp_path / "v000001", model, "q_proj", "lm_head")
    merge_adapter(directory, tmp_path / "merged")
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        merged = load_model(tmp_path / "merged")(ids).logits
        torch.testing.assert_close(merged, policy.model(ids).logits, atol=1e-5, rtol=0)
        assert (merged - load_model(model)(ids).logits).abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imports of compressed-tensors
def test_a_merged_model_of_quantised_weights_has_the_tensors_of_one_that_never_was(tmp_path):
    model = make_model(tmp_path / "model")
    with safe_open(model / "model.safetensors", "pt") as file:
        names = file.keys()
    pack_integers(model)
    directory, policy = written_version(tmp_path / "v000001", model)
    merge_adapter(directory, tmp_path / "merged")
    with safe_open(tmp_path / "merged" / "model.safetensors", "pt") as file:
        assert file.keys() == names
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        merged = load_model(tmp_path / "merged")(ids).logits
        torch.testing.assert_close(merged, policy.model(ids).logits, atol=1e-4, rtol=0)


def test_a_merged_adapter_gives_the_logits_of_the_policy(tmp_path, version, model):
    directory, policy = version
    done = invoke("policies", "merge", str(directory), str(tmp_path / "merged"))
    assert done.exit_code == 0, done.output
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        merged = load_model(tmp_path / "merged")(ids).logits
        torch.testing.assert_close(merged, policy.model(ids).logits, atol=1e-5, rtol=0)
        assert (merged - load_model(model)(ids).logits).abs().max() > 1e-3
    again = invoke("policies", "merge", str(directory), str(tmp_path / "merged"))
    assert "is not empty: name a new directory" in again.output
    write_manifest(tmp_path / "merged", {"version": 8, "kind": "full"})
    whole = invoke("policies", "merge", str(tmp_path / "merged"), str(tmp_path / "other"))
    assert "is no version of kind 'lora' but 'full'" in whole.output


def test_a_merged_model_is_uploaded_to_a_private_repository(tmp_path, version, monkeypatch):
    """A stand-in of the Hub's client."""
    calls = []

    class HfApi:
        def create_repo(self, repository, **options):
            calls.append((repository, options))
            return f"https://hub.test/{repository}"

        def upload_folder(self, **options):
            calls.append(options)

    hub = types.ModuleType("huggingface_hub")
    hub.HfApi = HfApi
    destination = tmp_path / "merged"
    assert invoke("policies", "merge", str(version[0]), str(tmp_path / "first")).exit_code == 0
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    done = invoke("policies", "merge", str(version[0]), str(destination), "--push", "me/model")
    assert "Uploaded to https://hub.test/me/model." in done.output
    assert calls == [
        ("me/model", {"private": True, "exist_ok": True}),
        {"folder_path": str(destination), "repo_id": "me/model"},
    ]
