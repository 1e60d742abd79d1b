"""Loading a policy's model."""

import json
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from trainer.features import Settings
from trainer.model.loading import load_model, prepared
from trainer.publish.checkpoint import Checkpoints
from trainer.world import World
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.types import PolicyKind

CONFIG = GPTNeoXConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)


def test_lora_targets_choose_the_layers_that_get_an_adapter():
    """GPT-NeoX has one layer for query, key and value."""
    spec = Settings(model="neox", kind=PolicyKind.LORA, lora_targets=("query_key_value", "attention.dense"))
    trained = {
        name for name, each in prepared(GPTNeoXForCausalLM(CONFIG), spec).named_parameters() if each.requires_grad
    }
    assert {name.split("lora_")[0].split(".layers.0.")[1] for name in trained} == {
        "attention.query_key_value.",
        "attention.dense.",
    }


def test_each_name_in_lora_targets_must_be_of_a_layer():
    """A slip of the pen trained the other layers alone."""
    spec = Settings(model="neox", kind=PolicyKind.LORA, lora_targets=("query_key_value", "attention.dens"))
    layers = r"\['dense', 'dense_4h_to_h', 'dense_h_to_4h', 'query_key_value'\]"
    words = rf"lora_targets has \['attention.dens'\], which name no layer of the model 'neox': .*{layers}"
    with pytest.raises(SettingsError, match=words):
        prepared(GPTNeoXForCausalLM(CONFIG), spec)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def widen(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"hidden_size": 16}))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("model.safetensors", cut, "incomplete metadata, file not fully covered"),
        ("config.json", cut, "not a valid JSON file"),
        ("config.json", widen, "ignore_mismatched_sizes"),
    ],
)
def test_a_model_that_cannot_be_loaded_is_named_in_one_sentence(tmp_path, name, change, words):
    GPTNeoXForCausalLM(CONFIG).save_pretrained(tmp_path)
    change(tmp_path / name)
    with pytest.raises(BadCheckpoint, match=rf"^cannot load the model '{tmp_path}': [^\n]*{words}[^\n]*id$"):
        load_model(Settings(model=str(tmp_path)), "eager")


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"PK\x03\x04" + b"0" * 50])
def test_a_damaged_trainer_state_is_named_in_one_sentence(tmp_path, content):
    """torch says how to load files that are not trusted, in several lines, or nothing."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = checkpoints.state_directory(1) / "state.pt"
    state.parent.mkdir()
    state.write_bytes(content)
    words = rf"^the trainer state '{state}' cannot be read: [^.\n]+; restore it, or start a new ledger$"
    with pytest.raises(BadCheckpoint, match=words):
        checkpoints.read_state(1)


def test_a_state_of_another_model_is_refused_without_tracebacks_of_torch(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.write_state(1, {}, {"head": torch.zeros(3)})
    with pytest.raises(BadCheckpoint) as refused:
        checkpoints.read_tensors(1, {"head": torch.zeros(4)}, World())
    assert str(refused.value) == (
        f"the trainer state '{checkpoints.state_directory(1) / 'tensors'}' cannot be read, or does not fit this model "
        "and optimizer: Size mismatch between saved torch.Size([3]) and current: torch.Size([4]) for head"
    )
