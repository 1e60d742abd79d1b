"""`turnwise policies merge`: an adapter added to its base model's weights; a tied head becomes a matrix of its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from trainer.model.loading import PACKED, bad_checkpoint, copy_tokenizer, model_class, quantised_by, read_config
from turnwise.errors import BadCheckpoint, SettingsError
from turnwise.types import PolicyKind
from turnwise.version_directory import ADAPTER_CONFIG, read_json, read_manifest

HEAD = "lm_head"


def merge_adapter(version_directory: Path, destination: Path, *, model: str | None = None) -> None:
    """Write the merged model of a version of kind `lora` in the Hugging Face layout.

    It has the precision of the base model, which for None is the one that the version names.

    Raises:
        BadCheckpoint: The version is no adapter, or the base model cannot be loaded.
        SettingsError: The destination holds files.
    """
    from peft import PeftModel

    manifest = read_manifest(version_directory)
    if manifest.get("kind") != PolicyKind.LORA.value:
        raise BadCheckpoint(
            f"{str(version_directory)!r} is no version of kind 'lora' but {manifest.get('kind')!r}: only adapters are "
            "merged, whole weights can be used as they are"
        )
    if destination.exists() and any(destination.iterdir()):
        raise SettingsError(f"{str(destination)!r} is not empty: name a new directory")
    base = model or str(manifest["base_model"])
    with bad_checkpoint(f"cannot load the base model {base!r}", "; name it with --model"):
        config = read_config(base)
        method = quantised_by(config)
        whole = model_class(config).from_pretrained(base, config=config, dtype="auto")
        if method == PACKED:
            whole = whole.dequantize()
    head, targets = whole.get_output_embeddings(), read_json(version_directory / ADAPTER_CONFIG)["target_modules"]
    if head.weight is whole.get_input_embeddings().weight and HEAD in targets:
        # The adapter changes the head alone; merged into the shared tensor, it would change the embeddings too.
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        whole.config.tie_word_embeddings = False
    with torch.no_grad(), bad_checkpoint(f"the adapter {str(version_directory)!r} cannot be loaded"):
        merged = PeftModel.from_pretrained(whole, str(version_directory)).merge_and_unload()
    merged.save_pretrained(destination, state_dict=None if method is None else _plain(merged))
    copy_tokenizer(base, destination)


def _plain(model: Any) -> dict[str, torch.Tensor]:
    """Return the weights of a model that was quantised, without scales and shapes, and let them be written so."""
    from transformers.integrations.bitsandbytes import Bnb4bitDeserialize

    model._weight_conversions = [  # noqa: SLF001  transformers reverts them as it writes, and cannot revert this one
        each
        for each in model._weight_conversions or ()  # noqa: SLF001  as above
        if not any(isinstance(one, Bnb4bitDeserialize) for one in getattr(each, "operations", ()))
    ]
    with torch.device("meta"):
        names = model_class(model.config).from_config(model.config).state_dict().keys()
    return {name: tensor for name, tensor in model.state_dict().items() if name in names}


def push(directory: Path, repository: str) -> str:
    """Upload a directory to a repository of the Hugging Face Hub, created private if needed; return its address.

    The token is the Hub's own: `hf auth login`, or HF_TOKEN.
    """
    api = importlib.import_module("huggingface_hub").HfApi()
    address = str(api.create_repo(repository, private=True, exist_ok=True))
    api.upload_folder(folder_path=str(directory), repo_id=repository)
    return address
