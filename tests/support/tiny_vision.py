"""Very small models that see, with random weights, and chains with images for them, without a tokenizer."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from support import served_vision
from support.served_vision import PROCESSOR, disturb_vectors

from trainer.batch.chain import Chain, chain_of
from trainer.features.images import opened
from turnwise.chains import Experience
from turnwise.features.images import IMAGES, PlacedImage

IMAGE, BORDER, VOCABULARY = 50, 51, 64
TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": None,
}
TILES = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": True}
IDS = {"image_token_id": IMAGE, "video_token_id": 52, "vision_start_token_id": BORDER, "vision_end_token_id": 53}
KINDS = ("Idefics3", "Qwen2_5_VL", "Qwen3VL")


def _rope(section: list[int], **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": section, **more}}


def _config(kind: str) -> tuple[transformers.PretrainedConfig, dict[str, Any]]:
    sees = {"hidden_size": 32, "intermediate_size": 64, "initializer_range": 0.1}
    if kind == "Idefics3":
        tower = sees | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
        text = TEXT | {"model_type": "llama"}
        config = transformers.Idefics3Config(
            text_config=text, vision_config=tower, scale_factor=2, image_token_id=IMAGE, tie_word_embeddings=False
        )
        return config, PROCESSOR | TILES | {"image_processor_type": "Idefics3ImageProcessor", "do_pad": True}
    if kind == "Gemma3":
        tower = sees | {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8}
        text = TEXT | {"head_dim": 32, "layer_types": ["full_attention"] * 3}
        made = transformers.Gemma3Config(
            text_config=text, vision_config=tower, mm_tokens_per_image=4, image_token_id=IMAGE, image_token_index=IMAGE
        )
        return made, PROCESSOR | {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 32, "width": 32}}
    tower = sees | {"depth": 2, "num_heads": 2, "out_hidden_size": 64}
    tower |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    sizes = {"merge_size": 2, "temporal_patch_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
    if kind == "Qwen2_5_VL":
        tower |= {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
        text = TEXT | _rope([4, 6, 6])
        sizes |= {"patch_size": 14, "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 16}}
        made = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **IDS)
    else:
        tower |= {"patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text = TEXT | _rope([6, 5, 5], mrope_interleaved=True) | {"head_dim": 32}
        sizes |= {"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}}
        made = transformers.Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False, **IDS)
    return made, PROCESSOR | sizes


def make_vision_model(directory: Path, kind: str) -> Path:
    torch.manual_seed(0)
    config, processor = _config(kind)
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    disturb_vectors(model)
    model.save_pretrained(directory)
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    return directory


def picture(seed: int, size: tuple[int, int] = (32, 32), mode: str = "RGB", name: str = "PNG") -> bytes:
    return served_vision.picture(seed, size, mode, name)


class Chains:
    """Makes chains for a model: what is text, what is sampled and what is an image is said part by part."""

    def __init__(self, directory: Path) -> None:
        self._config = transformers.AutoConfig.from_pretrained(directory)
        self._processor = transformers.AutoImageProcessor.from_pretrained(directory)

    def num_tokens(self, content: bytes) -> int:
        made = self._processor([opened(content)], return_tensors="pt")
        tower = self._config.vision_config
        if "image_grid_thw" in made:
            return int(made["image_grid_thw"].prod()) // tower.spatial_merge_size**2
        if hasattr(self._config, "mm_tokens_per_image"):
            return int(self._config.mm_tokens_per_image)
        side = tower.image_size // tower.patch_size // self._config.scale_factor
        return int(made["pixel_values"].shape[1]) * side**2

    def chain(self, session_id: str, *parts: list[int] | tuple[int, ...] | bytes) -> Chain:
        """Return a chain of these parts: a list is text of the prompt, a tuple is sampled, bytes are an image."""
        tokens: list[int] = []
        sampled: list[bool] = []
        images = []
        for part in parts:
            ids = list(part)
            if isinstance(part, bytes):
                count = self.num_tokens(part)
                ids = [BORDER, *[IMAGE] * count, 53]
                images.append(
                    PlacedImage(
                        digest=hashlib.sha256(part).hexdigest(),
                        offset=len(tokens),
                        length=len(ids),
                        runs=((len(tokens) + 1, count),),
                        processor="",
                        pixels="",
                        content=part,
                    )
                )
            tokens += ids
            sampled += [isinstance(part, tuple)] * len(ids)
        mask = np.array(sampled)
        turns = np.cumsum(np.diff(mask.astype(int), prepend=0) == 1) - 1
        num_turns = int(turns[-1]) + 1
        stored = Experience(
            session_id=session_id,
            group_id="g",
            turn_ids=tuple(f"{session_id}-{turn}" for turn in range(num_turns)),
            turn_steps=tuple(range(num_turns)),
            tokens=np.array(tokens, np.int32),
            prompt_length=int(mask.argmax()),
            loss_mask=mask,
            turn_index=np.where(mask, turns, -1).astype(np.int32),
            logprobs=np.where(mask, -1.0, 0.0).astype(np.float32),
            parts={IMAGES: tuple(images)} if images else {},
            turn_rewards=np.zeros(num_turns),
            turn_own_rewards=np.zeros(num_turns),
            turn_returns=np.zeros(num_turns),
            turn_shares=np.ones((2, num_turns)),
            reward=0.0,
            policy_version_first=0,
            policy_version_last=0,
            info={"credit": "propagate", "sampling": [{}] * num_turns},
        )
        return chain_of(stored)
