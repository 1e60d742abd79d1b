"""Very small models that see and that vLLM serves, with random weights, a tokenizer and a template of their own."""

import base64
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from PIL import Image

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{%- endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.content is string %}{{ message.content }}"
    "{%- elif message.content %}{%- for part in message.content %}"
    "{{ part.text if part.type == 'text' else 'PLACEHOLDER' }}{%- endfor %}{%- endif %}"
    "{%- for call in message.tool_calls or [] %}"
    "<tool_call>\n{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>"
    "{%- endfor %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)
PROCESSOR: dict[str, Any] = {
    "do_resize": True,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "do_convert_rgb": True,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
SIGHT = {"Idefics3": "<image>", "SmolVLM": "<image>", "Qwen2_5_VL": "QWEN", "Qwen3VL": "QWEN"}
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
    *("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", "<video>", *TILES),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
STD = 0.05
CONTEXT_TOKENS = 4096


def _tokenizer(kind: str) -> transformers.PreTrainedTokenizerFast:
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=600, special_tokens=list(SPECIAL), initial_alphabet=alphabet)
    made.train([json.__file__], trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>", extra_special_tokens={}
    )
    fast.chat_template = TEMPLATE.replace("PLACEHOLDER", SIGHT[kind].replace("QWEN", QWEN))
    return fast


def _qwen(kind: str, text: dict[str, Any], ids: Any) -> tuple[Any, dict[str, Any]]:
    tower = {"depth": 2, "hidden_size": 64, "intermediate_size": 128, "num_heads": 1, "out_hidden_size": 128}
    tower |= {"spatial_merge_size": 2, "temporal_patch_size": 2, "initializer_range": STD}
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    marks = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    named = dict(zip(names, map(ids, marks), strict=True))
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4}
    sizes = {"merge_size": 2, "temporal_patch_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
    if kind == "Qwen2_5_VL":
        tower |= {"patch_size": 14, "window_size": 112, "fullatt_block_indexes": [1]}
        text = {name: value for name, value in text.items() if name != "head_dim"}
        config = transformers.Qwen2_5_VLConfig(
            text_config=text | {"rope_parameters": rope | {"mrope_section": [8, 12, 12]}}, vision_config=tower, **named
        )
        return config, sizes | {"patch_size": 14, "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16}
    tower |= {"patch_size": 16, "num_position_embeddings": 256, "deepstack_visual_indexes": [0, 1]}
    rope |= {"mrope_section": [12, 10, 10], "mrope_interleaved": True}
    config = transformers.Qwen3VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=tower, **named)
    return config, sizes | {"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}}


def _idefics(kind: str, text: dict[str, Any], ids: Any, split: int) -> tuple[Any, dict[str, Any]]:
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 1}
    tower |= {"image_size": 64, "patch_size": 16, "initializer_range": STD}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text | {"model_type": "llama"},
        vision_config=tower,
        scale_factor=2,
        image_token_id=ids("<image>"),
        pad_token_id=ids("<|endoftext|>"),
        tie_word_embeddings=False,
    )
    tiles = {"size": {"longest_edge": max(64, split)}, "max_image_size": {"longest_edge": 64}}
    tiles |= {"do_image_splitting": split > 0, "do_pad": True, "resample": 1}
    tiles["image_processor_type"] = f"{kind}ImageProcessor"
    if kind == "SmolVLM":
        tiles["video_sampling"] = {"fps": 1, "max_frames": 4, "video_size": {"longest_edge": 64}}
        tiles["video_processor_type"] = "SmolVLMVideoProcessor"
    return config, tiles


def make_served_model(directory: Path, kind: str = "Idefics3", *, split: int = 128) -> Path:
    """Write a model; `split` is the longest edge of what Idefics3 cuts into tiles of 64, and 0 cuts nothing."""
    torch.manual_seed(0)
    tokenizer = _tokenizer(kind)
    ids = tokenizer.convert_tokens_to_ids
    text = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 2}
    text |= {
        "num_key_value_heads": 1,
        "head_dim": 64,
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT_TOKENS,
    }
    text |= {"eos_token_id": ids("<|im_end|>"), "pad_token_id": ids("<|endoftext|>"), "bos_token_id": None}
    text |= {"initializer_range": STD, "tie_word_embeddings": False, "max_position_embeddings": CONTEXT_TOKENS}
    config, sizes = _qwen(kind, text, ids) if "Qwen" in kind else _idefics(kind, text, ids, split)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).float()
    disturb_vectors(model)
    model.generation_config = transformers.GenerationConfig(eos_token_id=text["eos_token_id"])
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    names = {"processor_class": f"{kind}Processor"}
    (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR | sizes | names))
    sequence = {} if "Qwen" in kind else {"image_seq_len": 4}
    (directory / "processor_config.json").write_text(json.dumps(names | sequence))
    (directory / "chat_template.jinja").write_text(tokenizer.chat_template)
    if kind == "Qwen3VL":
        video = PROCESSOR | sizes | {"video_processor_type": "Qwen3VLVideoProcessor"}
        (directory / "video_preprocessor_config.json").write_text(json.dumps(video))
    return directory


def disturb_vectors(model: torch.nn.Module) -> None:
    """Give biases and norms values as trained ones have."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.02)


def picture(seed: int, size: tuple[int, int] = (64, 64), mode: str = "RGB", name: str = "PNG") -> bytes:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], len(mode)), dtype=np.uint8)
    with io.BytesIO() as file:
        Image.fromarray(values, mode).save(file, name)
        return file.getvalue()


def data_url(content: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(content).decode()}"


def shown(content: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}}
