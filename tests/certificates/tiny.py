"""Tiny models with random weights, made with the classes of the official checkpoints, for `make certify`.

Each has four layers of width 64 and a tokenizer with ChatML. Norms and biases are random too, so that a part that an
engine did not load would show. Heads of gated delta nets are 128 wide, because vLLM's CPU kernels take no smaller ones.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from support.tiny_models import quantise

from turnwise.default_models.small_model import SmallModelSpec, train_tokenizer

TESTS = Path(__file__).parents[1]
PACKED = TESTS.parent / ".packed"
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
CAPPED = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
FLAT = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": None}
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
EXPERTS = ROUTED | {"num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 1}
GROUPED = ROUTED | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MLA = {"q_lora_rank": 32, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
DELTA = {f"linear_{what}_head_dim": 128 for what in ("key", "value")} | {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
}
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 1, "mamba_d_conv": 4}
SIGLIP = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
PIXTRAL = SIGLIP | {"model_type": "pixtral", "head_dim": 32, "image_size": 64, "patch_size": 16}
SEEN = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "patch_size": 16,
    "out_hidden_size": 64,
}
LFM2 = {"conv_dim": 64, "conv_dim_out": 64, "block_dim": 64, "block_ff_dim": 128, "block_multiple_of": 32}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 2048} | {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
ROPE3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@dataclass(frozen=True)
class Tiny:
    """What a tiny model is made of."""

    family: str
    """Begin of the names of its classes of transformers."""
    text: dict[str, Any]
    """Fields of the text model's configuration beside the sizes."""
    vision: dict[str, Any] | None = None
    """Fields of a wrapper's vision tower; None for a text model."""
    further: dict[str, Any] | None = None
    """Fields of the wrapper."""
    carried: tuple[str, ...] = ()
    """Tensors that official checkpoints have and transformers does not load."""
    quantised: str | None = None
    """How the linear layers are stored: as `FP8`, or in bitsandbytes' four bits, `NF4`."""


TINY = {
    "qwen3": Tiny("Qwen3", {"tie_word_embeddings": True}),
    "qwen3_fp8": Tiny("Qwen3", {"tie_word_embeddings": True}, quantised="FP8"),
    "qwen3_nf4": Tiny("Qwen3", {"tie_word_embeddings": True}, quantised="NF4"),
    "llama3": Tiny(
        "Llama", {"tie_word_embeddings": True, "rope_parameters": {**ROPE3, "original_max_position_embeddings": 512}}
    ),
    "olmo3": Tiny("Olmo3", {**WINDOWS, **FLAT}),
    "phi3": Tiny("Phi3", {**FLAT, "sliding_window": None, "original_max_position_embeddings": 2048}),
    "smollm3": Tiny("SmolLM3", {**FLAT, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False}),
    "gemma3_text": Tiny("Gemma3", {**WINDOWS, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "qwen35_text": Tiny("Qwen3_5", {**DELTA, "rope_parameters": MROPE, "tie_word_embeddings": True}),
    "granite4": Tiny(
        "GraniteMoeHybrid",
        {
            **FLAT,
            **MAMBA,
            "layer_types": ["mamba", "attention"] * 2,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": 128,
            "mamba_chunk_size": 32,
            "position_embedding_type": "nope",
            "tie_word_embeddings": True,
        },
    ),
    "falconh1": Tiny("FalconH1", {**MAMBA, "mamba_d_ssm": 128, "mamba_chunk_size": 32}),
    "lfm2": Tiny(
        "Lfm2",
        {
            **FLAT,
            **LFM2,
            "layer_types": ["conv", "full_attention"] * 2,
            "block_auto_adjust_ff_dim": False,
            "block_ffn_dim_multiplier": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2": Tiny("Qwen2", {**FLAT, "use_sliding_window": False}),
    "seedoss": Tiny("SeedOss", {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False}),
    "ernie45": Tiny("Ernie4_5", {"use_bias": False, "tie_word_embeddings": True}),
    "hunyuan": Tiny("HunYuanDenseV1", {}),
    "exaone4": Tiny("Exaone4", WINDOWS),
    "olmo2": Tiny("Olmo2", FLAT),
    "phi": Tiny("Phi", {**FLAT, "partial_rotary_factor": 0.5}),
    "opt": Tiny("OPT", {"ffn_dim": 128, "word_embed_proj_dim": 64, "num_attention_heads": 2}),
    "cohere": Tiny("Cohere", {**FLAT, "logit_scale": 0.25, "use_qk_norm": True, "tie_word_embeddings": True}),
    "gemma2": Tiny("Gemma2", {**WINDOWS, **CAPPED, "query_pre_attn_scalar": 32, "tie_word_embeddings": True}),
    "stablelm": Tiny("StableLm", {**FLAT, "partial_rotary_factor": 0.25, "use_qkv_bias": True}),
    "falcon": Tiny("Falcon", {**FLAT, "multi_query": True, "alibi": False, "parallel_attn": True, "bias": False}),
    "nemotronh": Tiny(
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "mlp", "mamba"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 32,
            "n_groups": 1,
            "chunk_size": 32,
            "use_conv_bias": True,
        },
    ),
    "mixtral": Tiny("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": Tiny("Qwen3Moe", EXPERTS),
    "qwen3next": Tiny(
        "Qwen3Next", {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.25}
    ),
    "glm4moe": Tiny(
        "Glm4Moe",
        {
            **GROUPED,
            "use_qk_norm": True,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1,
        },
        carried=("model.layers.4.eh_proj.weight",),
    ),
    "deepseekv3": Tiny(
        "DeepseekV3", {**GROUPED, **MLA, "num_key_value_heads": 4, "head_dim": None, "topk_method": "noaux_tc"}
    ),
    "gptoss": Tiny("GptOss", {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen35": Tiny(
        "Qwen3_5", {**DELTA, "rope_parameters": {**MROPE, "mrope_interleaved": True}}, SEEN, carried=("mtp.fc.weight",)
    ),
    "qwen3vl": Tiny(
        "Qwen3VL",
        {"rope_parameters": {**MROPE, "mrope_section": [6, 5, 5], "partial_rotary_factor": 1.0}},
        SEEN | {"deepstack_visual_indexes": [0, 1]},
    ),
    "gemma3": Tiny(
        "Gemma3",
        {**WINDOWS, "query_pre_attn_scalar": 32},
        SIGLIP | {"image_size": 32, "patch_size": 8},
        {"mm_tokens_per_image": 4},
    ),
    "mistral3": Tiny("Mistral3", {"model_type": "mistral", "sliding_window": None}, PIXTRAL, {"spatial_merge_size": 2}),
    "ministral3": Tiny(
        "Mistral3",
        {"model_type": "ministral3", "rope_parameters": YARN, "tie_word_embeddings": True},
        PIXTRAL,
        {"spatial_merge_size": 2},
    ),
    "qwen25vl": Tiny(
        "Qwen2_5_VL",
        {**FLAT, "rope_parameters": {**MROPE, "mrope_section": [4, 6, 6], "partial_rotary_factor": 1.0}},
        SEEN | {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]},
    ),
    "gemma4": Tiny(
        "Gemma4",
        {
            **WINDOWS,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0,
            "enable_moe_block": False,
            "tie_word_embeddings": True,
        },
        SIGLIP | {"num_key_value_heads": 2, "head_dim": 32, "patch_size": 16, "position_embedding_size": 64},
        {"audio_config": None},
    ),
    "llama4": Tiny(
        "Llama4",
        {
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 1,
            "attention_chunk_size": 32,
            "no_rope_layers": [1, 1, 1, 0],
        },
        SIGLIP
        | {"intermediate_size": 256, "image_size": 28, "patch_size": 14, "pixel_shuffle_ratio": 0.5}
        | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 64),
    ),
}
"""By the names of the rows."""


def build(name: str, directory: Path, **changes: Any) -> Path:
    """Write a model, whose text part has these fields instead; return its directory."""
    tiny, tokenizer = TINY[name], train_tokenizer(SmallModelSpec())
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.08,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    fields = {key: value for key, value in (sizes | tiny.text | changes).items() if key != "head_dim" or value}
    model = _made(tiny, fields)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim == 1 and ("norm" in parameter_name or "bias" in parameter_name):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tokenizer.save_pretrained(directory)
    model.generation_config = tf.GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(directory)
    file = directory / "model.safetensors"
    further = {each: torch.randn(64, 128) for each in tiny.carried}
    save_file(load_file(file) | further, file, metadata={"format": "pt"})
    if tiny.quantised == "FP8":
        quantise(directory)
    elif tiny.quantised == "NF4":
        subprocess.run([sys.executable, "-m", "certificates.packed", str(directory)], check=True, env=environment(name))
    return directory


def environment(name: str) -> dict[str, str]:
    """Return the environment of a process that has the model; `make` puts what four bits need into .packed."""
    packages = [str(PACKED)] if name in TINY and TINY[name].quantised == "NF4" else []
    return {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(TESTS), *packages])}


def _made(tiny: Tiny, fields: dict[str, Any]) -> Any:
    made: Callable[[str], Any] = lambda suffix: getattr(tf, f"{tiny.family}{suffix}")  # noqa: E731
    if tiny.vision is None:
        has_own = tiny.family in {"Gemma3", "Qwen3_5"}  # their plain names are the wrappers'
        return made("ForCausalLM")(made("TextConfig" if has_own else "Config")(**fields))
    tied = {"tie_word_embeddings": fields["tie_word_embeddings"]}
    config = made("Config")(text_config=fields, vision_config=tiny.vision, **tied, **(tiny.further or {}))
    return made("ForConditionalGeneration")(config)


def architecture_of(directory: Path) -> str:
    """Return the class that a model's configuration names, with its text part's type, and how it is quantised."""
    config = json.loads((directory / "config.json").read_text())
    text = f" ({config['text_config']['model_type']})" if "text_config" in config else ""
    stated = config.get("quantization_config")
    how = "" if stated is None else ", NF4" if stated.get("load_in_4bit") else ", FP8"
    return f"{config['architectures'][0]}{text}{how}"
