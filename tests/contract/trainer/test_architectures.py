"""What an adapter reaches in the models of today, and that a version of whole weights is the model that was served."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.tiny_models import EXPERTS, SIZES, config_of, make_model, pack_integers, quantise

from trainer.features import Settings
from trainer.features.devices import empty_model
from trainer.features.experts import RouterReplay
from trainer.forward import load_version
from trainer.model.adapters import reach_of
from trainer.model.loading import described, load_model
from trainer.model.model import Policy
from trainer.model.traits import check_repeatable
from turnwise.errors import SettingsError
from turnwise.types import PolicyKind, PolicyVersion

DENSE = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
MLA = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1}
GROUPED = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1}
DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
MAMBA = {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4, "mamba_d_head": 16, "num_local_experts": 0}
FUSED = {"gate_up_proj", "down_proj"}


def empty(family: str, **changes: Any) -> Any:
    with torch.device("meta"):
        return getattr(transformers, f"{family}ForCausalLM")(config_of(family, **changes))


def vision(**changes: Any) -> dict[str, Any]:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    return sizes | {"image_size": 8, "patch_size": 4} | changes


def gemma3() -> transformers.Gemma3Config:
    text = SIZES | {"layer_types": ["sliding_attention", "full_attention"]}
    return transformers.Gemma3Config(text_config=text, vision_config=vision(), mm_tokens_per_image=4)


def qwen35() -> transformers.Qwen3_5Config:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 0, 0], "partial_rotary_factor": 0.25}
    text = SIZES | DELTA | {"layer_types": ["linear_attention", "full_attention"], "rope_parameters": rope}
    seen = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    return transformers.Qwen3_5Config(text_config=text, vision_config=seen, tie_word_embeddings=False)


WRAPPERS = {"Gemma3": gemma3, "Qwen3_5": qwen35}


@pytest.mark.parametrize(
    ("family", "changes", "reached", "left_out"),
    [
        ("Qwen3", {}, DENSE, set()),
        ("Phi3", {}, {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}, set()),
        ("Glm", {"head_dim": 8}, {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}, {"gate_up_proj"}),
        ("Glm4", {"head_dim": 8}, {"q_proj", "k_proj", "v_proj", "o_proj", "down_proj"}, {"gate_up_proj"}),
        ("GPTNeoX", {}, {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"}, set()),
        ("Qwen3Moe", EXPERTS, {"q_proj", "k_proj", "v_proj", "o_proj"}, FUSED),
        ("Glm4Moe", ROUTED | GROUPED, {"q_proj", "k_proj", "v_proj", "o_proj"}, FUSED | {"gate_proj", "up_proj"}),
        (
            "DeepseekV3",
            MLA | ROUTED | GROUPED | {"v_head_dim": 8},
            {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"},
            FUSED | {"gate_proj", "up_proj", "kv_b_proj"},
        ),
        (
            "GraniteMoeHybrid",
            MAMBA,
            {"q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "input_linear", "output_linear"},
            {"out_proj"},
        ),
    ],
)
def test_an_adapter_changes_every_linear_layer_that_engines_serve_and_names_the_others(
    family, changes, reached, left_out
):
    reach = reach_of(empty(family, **changes))
    assert set(reach.targets) == reached
    assert set(reach.left_out) == left_out
    assert 0 < reach.share < 1


@pytest.mark.parametrize("wanted", ["gate_up_proj", "mlp.gate_up_proj"])
def test_a_layer_whose_halves_alone_engines_adapt_is_refused_by_name_before_it_is_trained(wanted):
    with pytest.raises(
        SettingsError, match=r"lora_targets has 'gate_up_proj' of 'glm': vLLM expects an adapter of each"
    ):
        reach_of(empty("Glm4", head_dim=8), ["q_proj", wanted], name="glm")
    assert reach_of(empty("Phi3"), [wanted]).num_layers == 2


def test_the_share_of_the_parameters_that_an_adapter_changes_is_stated():
    """Qwen3 with hidden size 32: a layer has q and o 32 x 32, k and v 16 x 32, three matrices 48 x 32, 7,680 in all.

    Norms have 32 + 32 + 8 + 8. With embeddings of 48 x 32 and a last norm of 32, two layers make 17,088 parameters.
    """
    reach = reach_of(empty("Qwen3"))
    assert reach.num_layers == 14
    assert reach.share == pytest.approx(15_360 / 17_088)
    names = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    assert str(reach) == f"14 layers ({names}), 90% of the language model's parameters"


@pytest.mark.parametrize("family", WRAPPERS)
@pytest.mark.parametrize("targets", [(), ("q_proj", "o_proj", "down_proj")])
def test_an_adapter_of_a_wrapper_stays_out_of_its_other_parts(tmp_path, family, targets):
    """Gemma 3's vision tower has layers named q_proj too."""
    write_wrapper(tmp_path, family)
    spec = Settings(model=str(tmp_path), kind=PolicyKind.LORA, lora_rank=2, lora_targets=targets)
    names = [name for name, each in load_model(spec, "sdpa").named_parameters() if each.requires_grad]
    assert names
    assert all(".language_model.layers." in name for name in names)


def write_wrapper(directory: Path, family: str) -> Path:
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForConditionalGeneration")(WRAPPERS[family]()).save_pretrained(directory)
    return directory


def add(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "further"),
    [("Gemma3", "extra.weight"), ("Qwen3_5", "mtp.fc.weight"), ("Glm4Moe", "model.layers.2.eh_proj.weight")],
)
def test_a_version_has_the_names_of_the_served_model_and_the_tensors_that_transformers_leaves_out(
    tmp_path, family, further
):
    base, version = tmp_path / "base", tmp_path / "version"
    if family in WRAPPERS:
        write_wrapper(base, family)
    else:
        make_model(base, family, **ROUTED, **GROUPED)
    add(base, {further: torch.full((2, 3), 7.0)})
    policy = Policy(Settings(model=str(base), device="cpu"))
    policy.load(0)
    with torch.no_grad():
        for each in policy.parameters():
            each += 1
    policy.save(version, policy.trained_state())
    before, after = load_file(base / "model.safetensors"), load_file(version / "model.safetensors")
    assert after.keys() == before.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    kept = {name for name in before if any(word in name for word in ("vis", "multi_modal", "e_score"))} | {further}
    assert changed == before.keys() - kept
    configs = [json.loads((place / "config.json").read_text()) for place in (base, version)]
    assert configs[0]["architectures"] == configs[1]["architectures"]
    assert configs[0]["model_type"] == configs[1]["model_type"]


def test_a_model_that_would_be_written_under_other_names_is_refused_before_it_is_trained(tmp_path):
    make_model(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({f"base.{name}": value for name, value in load_file(file).items()}, file, metadata={"format": "pt"})
    with pytest.raises(SettingsError, match=r"writes 24 tensors of .* under names that its files do not have"):
        Policy(Settings(model=str(tmp_path), device="cpu")).load(0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"are quantised \(fp8\): .*set kind='lora'"),
        ({"model_type": "gpt_oss"}, "attention sinks that vLLM does not load into .*: set kind='lora'"),
        ({"architectures": ["Qwen3ForImages"]}, "is a Qwen3ForImages, and transformers .* as a Qwen3ForCausalLM"),
    ],
)
def test_whole_weights_that_no_engine_would_load_are_refused_before_the_model_is_loaded(tmp_path, change, words):
    make_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SettingsError, match=words):
        load_model(Settings(model=str(tmp_path)), "eager")


def test_the_share_that_an_adapter_reaches_of_packed_weights_is_that_of_what_they_stand_for():
    model = empty("Qwen3")
    known = str(reach_of(model))
    for layer in model.model.modules():
        if isinstance(layer, torch.nn.Linear):
            packed = torch.empty(layer.weight.numel() // 2, 1, dtype=torch.uint8, device="meta")
            layer.weight = torch.nn.Parameter(packed, requires_grad=False)
    assert str(reach_of(model)) == known


def test_several_processes_do_not_share_weights_in_four_bits(tmp_path):
    make_model(tmp_path)
    config = tmp_path / "config.json"
    packed = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": packed}))
    with pytest.raises(SettingsError, match=r"\(bitsandbytes in 4 bits\).*: train in one process, or "):
        empty_model(Settings(model=str(tmp_path), kind="lora"), "eager")


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes"])  # the last one in 8 bits
def test_an_adapter_of_weights_that_the_trainer_cannot_compute_with_is_refused_at_the_start(tmp_path, method):
    make_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(SettingsError, match=rf"quantised \({method}\): .*; train and serve the model that is not"):
        described(Settings(model=str(tmp_path), kind="lora"))


def test_an_adapter_of_fp8_weights_is_trained_on_what_they_stand_for(tmp_path):
    make_model(tmp_path)
    file, tokens = tmp_path / "model.safetensors", list(range(20))
    whole = load_file(file)
    stands_for = {
        name: (value * 16).to(torch.float8_e4m3fn).to(torch.float32) / 16 if "_proj" in name else value
        for name, value in whole.items()
    }
    save_file(stands_for, file, metadata={"format": "pt"})
    spec = Settings(model=str(tmp_path), kind="lora", device="cpu")
    expected, found = Policy(spec), Policy(spec)
    expected.load(0)
    logprobs = expected.next_logprobs(tokens)
    quantise(tmp_path)
    found.load(0)
    assert torch.equal(found.next_logprobs(tokens), logprobs)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # imports of compressed-tensors
def test_an_adapter_of_integers_of_compressed_tensors_is_trained_on_what_they_stand_for(tmp_path):
    stands_for = pack_integers(make_model(tmp_path))
    loaded = load_model(Settings(model=str(tmp_path), kind="lora"), "eager").state_dict()
    for name, expected in stands_for.items():
        assert torch.equal(loaded[f"base_model.model.{name.replace('.weight', '.base_layer.weight')}"], expected)


def test_an_adapter_of_experts_in_mxfp4_is_trained_on_what_they_stand_for(tmp_path):
    """A byte holds two of the sixteen values, the lower bits first, and 32 in a row share an exponent."""
    make_model(tmp_path, "GptOss", num_local_experts=2, num_experts_per_tok=1, intermediate_size=32)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored = load_file(file)
    stands_for = {name: stored.pop(name) for name in list(stored) if name.endswith("_proj") and "experts" in name}
    half = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    for name, (experts, inputs, outputs) in {name: tuple(value.shape) for name, value in stands_for.items()}.items():
        codes, exponents = torch.randint(16, (experts, outputs, 1, 32)), torch.randint(-2, 3, (experts, outputs, 1))
        values = torch.cat([half, -half])[codes] * torch.exp2(exponents.float())[..., None]
        stands_for[name] = values.reshape(experts, outputs, inputs).transpose(1, 2)
        stored[f"{name}_blocks"] = (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8)
        stored[f"{name}_scales"] = (exponents + 127).to(torch.uint8)
    save_file(stored, file, metadata={"format": "pt"})
    how = {"quant_method": "mxfp4", "modules_to_not_convert": []}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": how}))
    loaded = load_model(Settings(model=str(tmp_path), kind="lora"), "eager").state_dict()
    for name, expected in stands_for.items():
        assert torch.equal(loaded[f"base_model.model.{name}"], expected)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen3Moe", EXPERTS),
        ("Qwen3Next", {**EXPERTS, **DELTA, "layer_types": ["full_attention"] * 2}),
        ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Glm4Moe", {**ROUTED, **GROUPED, "routed_scaling_factor": 1.5}),
        ("DeepseekV3", {**ROUTED, **GROUPED, **MLA, "v_head_dim": 8, "routed_scaling_factor": 1.5}),
    ],
)
def test_the_trainer_follows_the_experts_of_each_kind_of_router(family, changes):
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family, **changes)).eval()
    tokens, own = torch.arange(10)[None], dict[int, torch.Tensor]()
    replay = RouterReplay.of(model, torch.device("cpu"))
    for layer, router in replay._routers.items():
        router.register_forward_hook(lambda _, __, found, layer=layer: own.update({layer: found[2]}))
    with torch.no_grad():
        alone = model(tokens).logits
        routing = torch.full((10, 2, 2), -1)
        for layer, experts in own.items():
            routing[:, layer] = experts
        replay.use(routing)
        followed = model(tokens).logits
        replay.use(torch.where(routing < 0, routing, (routing + 1) % 4))
        assert (model(tokens).logits - alone).abs().max() > 1e-4
    assert torch.allclose(followed, alone, atol=1e-6)


def test_a_router_whose_weights_are_computed_in_another_way_is_named(caplog):
    config = transformers.Llama4TextConfig(**SIZES, num_local_experts=4, intermediate_size_mlp=16)
    with torch.device("meta"):
        model = transformers.Llama4ForCausalLM(config)
    assert RouterReplay.of(model, torch.device("cpu")) is None
    assert "is not followed by Llama4Router" in caplog.text


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Qwen3", {"attention_dropout": 0.5}),
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.5}),
        ("Phimoe", {"num_local_experts": 4, "router_jitter_noise": 5.0, "input_jitter_noise": 0.5}),
    ],
)
def test_models_that_drop_in_functions_or_route_at_random_in_training_are_trained_as_they_are_served(
    tmp_path, family, changes
):
    """OPT's layers hold their share as a number; Phi-3.5-MoE samples experts within its jitter of the best."""
    model = getattr(transformers, f"{family}ForCausalLM")(config_of(family, **changes)).eval()
    model.save_pretrained(tmp_path)
    policy, tokens = Policy(Settings(model=str(tmp_path), device="cpu")), list(range(20))
    policy.load(0)
    assert policy.model.training
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
    torch.testing.assert_close(policy.next_logprobs(tokens), expected)


def test_a_model_that_is_computed_with_noise_is_refused_at_the_start():
    with pytest.raises(SettingsError, match=r"'noisy' with noise in training, .* nats a token .*: train another model"):
        check_repeatable(lambda _, targets: torch.rand(len(targets)), "noisy", 64, torch.float32)


def test_a_soft_cap_of_the_attention_is_computed_by_trainer_and_verification(tmp_path):
    """Gemma 2: SDPA leaves it out in silence, by up to 0.02 nats a token, which no check of the gap refuses."""
    make_model(tmp_path, "Gemma2", attn_logit_softcapping=0.2, query_pre_attn_scalar=1)
    tokens = list(range(20))
    eager = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    policy = Policy(Settings(model=str(tmp_path), device="cpu"))
    policy.load(0)
    verified = load_version(PolicyVersion(version=0, path=str(tmp_path)))
    with torch.no_grad():
        expected, checked = (each(torch.tensor([tokens])).logits[0].log_softmax(-1) for each in (eager, verified))
    torch.testing.assert_close(policy.next_logprobs(tokens), expected)
    torch.testing.assert_close(checked, expected)
    with pytest.raises(SettingsError, match="without the soft cap of its attention"):
        Policy(Settings(model=str(tmp_path), device="cpu", attention="sdpa")).load(0)
