"""What a version of whole weights holds: the trained tensors by the served model's names, and its other tensors.

Engines start with the base model and load a version into it, or start with the version. So a version has the names of
the base model's files, and also the tensors that transformers does not load, such as those that predict several tokens.
A model that transformers would write under other names is refused before it is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor

from turnwise.errors import SettingsError
from turnwise.version_directory import local_files, weight_files

HEAD = "lm_head.weight"


def by_published_names(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by their names in a checkpoint, where each expert, for example, has tensors of its own."""
    from transformers.core_model_loading import revert_weight_conversion

    contiguous = {name: value.contiguous() for name, value in weights.items()}
    return cast("dict[str, Tensor]", revert_weight_conversion(model, contiguous))


def check_names(model: Any, weights: Mapping[str, Tensor], base: str) -> None:
    """Refuse a model whose versions would have other names than its own files.

    Args:
        model: The model that transformers loaded.
        weights: What a version would hold; the values do not matter.
        base: Directory or id of the model.

    Raises:
        SettingsError: They would.
    """
    known = _files_of(base)
    empty = {name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in weights.items()}
    if known and (strange := by_published_names(model, empty).keys() - known.keys() - {HEAD}):
        raise SettingsError(
            f"transformers writes {len(strange)} tensors of {base!r} under names that its files do not have, such as "
            f"{min(strange)!r}, and an engine that serves those files would not load them: save the model with "
            "transformers first and serve the result, or set kind='lora'"
        )


def carried(model: Any, published: Mapping[str, Tensor], base: str) -> dict[str, Tensor]:
    """Return the tensors of the base model's files that are in no version otherwise, without a head that is tied."""
    is_tied = bool(getattr(model.config, "tie_word_embeddings", False))
    rest = {name: file for name, file in _files_of(base).items() if name not in published}
    found: dict[str, Tensor] = {}
    for file in sorted(set(rest.values())):
        with safe_open(file, "pt") as opened:
            names = [name for name, place in rest.items() if place == file and not (is_tied and name.endswith(HEAD))]
            found.update({name: opened.get_tensor(name) for name in names})
    return found


def _files_of(base: str) -> dict[str, str]:
    """Return the file of each tensor of a model; empty where its files are no safetensors."""
    directory = local_files(base)
    found: dict[str, str] = {}
    for path in [] if directory is None else weight_files(directory):
        with safe_open(path, "pt") as opened:
            found.update(dict.fromkeys(opened.keys(), str(path)))
    return found
