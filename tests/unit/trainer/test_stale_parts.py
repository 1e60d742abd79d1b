"""Which part of a model an engine kept, by its answer to a version's probe."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.tiny_models import logprobs_of
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.forward import load_version, name_stale_parts
from turnwise.features.verify.records import Verification
from turnwise.types import PolicyKind, PolicyStatus, PolicyVersion

TEXT = list(range(3, 19))
POSITIONS = list(range(1, len(TEXT)))


@pytest.fixture(scope="module", params=["full", "lora"])
def versions(request, tmp_path_factory: pytest.TempPathFactory) -> dict[int, PolicyVersion]:
    """Versions 0 and 1 of a model with tied embeddings: all weights of version 1 differ, or it is an adapter."""
    directory = tmp_path_factory.mktemp("versions")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True))
    model.save_pretrained(directory / "v000000")
    kind = PolicyKind(request.param)
    if kind is PolicyKind.LORA:
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(directory / "v000001")
    probe = {"token_ids": TEXT, "logprobs": logprobs_of(model, TEXT).tolist()}
    manifest = {"version": 1, "parent": 0, "base_model": str(directory / "v000000"), "probe": probe}
    (directory / "v000001" / "turnwise.json").write_text(json.dumps(manifest))
    return {
        0: PolicyVersion(version=0, path=str(directory / "v000000")),
        1: PolicyVersion(version=1, path=str(directory / "v000001"), kind=kind, status=PolicyStatus.FAILED),
    }


def named(versions: dict[int, PolicyVersion], engine: torch.nn.Module) -> str:
    versions[1].metrics["engine_answer"] = {"positions": POSITIONS, "logprobs": logprobs_of(engine, TEXT).tolist()}
    report = Verification()
    name_stale_parts(versions, report)
    (found,) = report.mismatches
    assert found.place == "version 1"
    return found.problem


@pytest.mark.parametrize(
    ("stale", "part"),
    [
        (("lm_head",), "lm_head"),
        (("layers.1.mlp",), "mlp of layer 1"),
        (("layers.0.self_attn", "layers.1.self_attn"), "self_attn of all layers"),
        (("",), "all of the model"),
    ],
)
def test_the_part_that_an_engine_kept_is_named(versions, stale, part):
    """The engine has version 1, and in the stale part the weights of version 0, or no adapter."""
    is_adapter = versions[1].kind is PolicyKind.LORA
    if is_adapter and stale == ("lm_head",):
        pytest.skip("the adapter has no part of the head")
    engine, old = load_version(versions[1]), load_version(versions[0]).state_dict()
    head = engine.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.detach().clone())
    kept = {
        name: torch.zeros_like(tensor) if is_adapter else old[name]
        for name, tensor in engine.state_dict().items()
        if any(one in name for one in stale) and (not is_adapter or ".lora_" in name)
    }
    engine.load_state_dict(kept, strict=False)
    assert named(versions, engine).startswith(f"the engine has {part} of version 0: ")


def test_an_answer_that_no_part_explains_is_said_to_be_none(versions):
    """The engine has another model."""
    engine = load_version(versions[0])
    with torch.no_grad():
        for parameter in engine.parameters():
            parameter += torch.randn_like(parameter)
    assert named(versions, engine) == "the engine's answer is that of no part with older weights"
