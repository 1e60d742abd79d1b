"""Checks on a version's directory before an engine loads it.

Loading a broken directory can crash an engine. `check_headers` reads headers only and is fast enough for a request;
`check_values` reads every byte and runs before a reload, while calls continue. Tensors are compared with those of the
served model, where its directory is readable here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from proxy.reload.safetensors_header import FLOATS, Tensor, find_not_finite, read_header
from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyKind
from turnwise.version_directory import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MODEL_CONFIG,
    TOKENIZER,
    compare_digests,
    read_json,
    read_weight_index,
    weight_files,
)

HEAD = "lm_head.weight"
"""Name of the output head. Where it is tied to the input embeddings, some writers leave it out."""
EMBEDDINGS = "embed_tokens.weight"
"""End of the name of the input embeddings."""


def check_headers(path: str, kind: PolicyKind, model_path: str | None = None) -> None:
    """Check a directory's headers for consistency, and against the served model.

    Args:
        path: the directory of the version.
        kind: whether it holds a whole model or an adapter.
        model_path: where the engine loaded its model from; compared if that is a directory here.

    Raises:
        BadCheckpoint: naming the file or tensor and what is wrong with it.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise BadCheckpoint(f"{path!r} is not a directory; publish the one with the version's *.safetensors files")
    served = Path(model_path) if model_path and weight_files(Path(model_path)) else None
    if kind is PolicyKind.LORA:
        _check_adapter(directory, served)
    else:
        _check_model(directory, served)


def check_values(path: str) -> None:
    """Read all weights: they hold no NaN or infinity, and match the digests of the manifest where there is one.

    Raises:
        BadCheckpoint: naming the file or tensor.
    """
    directory = Path(path)
    for file, problem in compare_digests(directory):
        if problem is not None:
            raise BadCheckpoint(f"{file} {problem}: it was changed after its digest was written; publish it again")
    for shard in weight_files(directory):
        name = find_not_finite(shard, read_header(shard))
        if name is not None:
            raise BadCheckpoint(f"{shard} holds a value in {name!r} that is infinite or NaN; the update diverged")


def check_tokenizer(path: str, model_path: str | None) -> None:
    """Check that a version's tokenizer gives a text the ids that the served model's tokenizer gives it.

    Engines keep the tokenizer that they started with, so weights trained with another one would read other words.

    Raises:
        BadCheckpoint: naming what differs. Directories without a tokenizer file are not compared.
    """
    ours, served = Path(path) / TOKENIZER, Path(model_path or "") / TOKENIZER
    if not (ours.is_file() and served.is_file()) or ours.read_bytes() == served.read_bytes():
        return
    new, old = read_json(ours), read_json(served)
    try:
        new_ids, old_ids = _token_ids(new), _token_ids(old)
        has_other_merges = _merges(new) != _merges(old)
    except (AttributeError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{ours} or {served} has not the form of a tokenizer.json: {error!r}") from error
    changed = [token for token, number in new_ids.items() if old_ids.get(token) != number]
    if changed or len(new_ids) != len(old_ids):
        named = f", such as that of {changed[0]!r}" if changed else ""
        raise BadCheckpoint(
            f"{ours} gives {len(changed) or 'some'} tokens other ids than the engine's tokenizer{named}; train with "
            "the tokenizer of the served model, or start the engine with this one"
        )
    if has_other_merges:
        raise BadCheckpoint(f"{ours} has other merges than the engine's tokenizer; texts would get other tokens")


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Return the id of each token of a `tokenizer.json`."""
    vocabulary = tokenizer.get("model", {}).get("vocab") or {}
    if isinstance(vocabulary, list):  # Unigram: pairs of token and score, in the order of their ids
        vocabulary = {entry[0]: number for number, entry in enumerate(vocabulary)}
    return vocabulary | {added["content"]: added["id"] for added in tokenizer.get("added_tokens") or []}


def _merges(tokenizer: dict[str, Any]) -> list[str]:
    merges = tokenizer.get("model", {}).get("merges") or []
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def _check_model(directory: Path, served: Path | None) -> None:
    config = read_json(directory / MODEL_CONFIG)
    tensors = _tensors(directory)
    if missing := read_weight_index(directory).keys() - tensors.keys():
        raise BadCheckpoint(f"{directory} lacks {len(missing)} tensors that its index names, such as {min(missing)!r}")
    if served is not None:
        served_config = read_json(served / MODEL_CONFIG)
        _check_same_architecture(directory, config, served_config)
        _check_same_tensors(directory, tensors, _tensors(served), tied=bool(served_config.get("tie_word_embeddings")))


def _check_same_architecture(directory: Path, config: dict[str, Any], served: dict[str, Any]) -> None:
    for field in ("model_type", "architectures"):
        if field in config and field in served and config[field] != served[field]:
            raise BadCheckpoint(
                f"{directory} is of another architecture: its {field} is {config[field]!r}, the engine serves "
                f"{served[field]!r}; publish a checkpoint of the served model, or start the engine with this one"
            )


def _check_same_tensors(directory: Path, tensors: dict[str, Tensor], served: dict[str, Tensor], *, tied: bool) -> None:
    optional = {HEAD} if tied else set()
    if missing := served.keys() - tensors.keys() - optional:
        raise BadCheckpoint(f"{directory} lacks {len(missing)} tensors of the served model, such as {min(missing)!r}")
    if strange := tensors.keys() - served.keys() - optional:
        raise BadCheckpoint(
            f"{directory} has {len(strange)} tensors that the served model lacks, such as {min(strange)!r}"
        )
    for name in tensors.keys() & served.keys():
        new, old = tensors[name], served[name]
        if new.shape != old.shape or (new.dtype != old.dtype and not {new.dtype, old.dtype} <= FLOATS):
            raise BadCheckpoint(
                f"{directory} has {name!r} as {new.dtype}{list(new.shape)}, the served model as "
                f"{old.dtype}{list(old.shape)}; it is of another architecture"
            )


def _check_adapter(directory: Path, served: Path | None) -> None:
    config = read_json(directory / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise BadCheckpoint(
            f"{directory} is not a LoRA adapter: peft_type {config.get('peft_type')!r}, r {config.get('r')!r}"
        )
    tensors = read_header(directory / ADAPTER_WEIGHTS)
    if not tensors:
        raise BadCheckpoint(f"{directory / ADAPTER_WEIGHTS} holds no tensor; write the adapter before publishing it")
    base = {} if served is None else _tensors(served)
    embeddings = next((tensor for name, tensor in base.items() if name.endswith(EMBEDDINGS)), None)
    if served is not None and embeddings and read_json(served / MODEL_CONFIG).get("tie_word_embeddings"):
        base.setdefault(HEAD, embeddings)
    for name, tensor in tensors.items():
        _check_adapter_tensor(directory, name, tensor, base)


def _check_adapter_tensor(directory: Path, name: str, tensor: Tensor, base: dict[str, Tensor]) -> None:
    """Check that a factor fits the matrix that it changes: A is [rank, in], B is [out, rank]."""
    module, _, factor = name.removeprefix("base_model.model.").partition(".lora_")
    if not base or not factor.startswith(("A.", "B.")):
        return
    changed = base.get(f"{module}.weight")
    if changed is None:
        raise BadCheckpoint(f"{directory} adapts {module!r}, which the served model lacks; it is of another model")
    axis = 1 if factor.startswith("A.") else 0
    if len(tensor.shape) != 2 or tensor.shape[axis] != changed.shape[axis]:
        raise BadCheckpoint(
            f"{directory} has {name!r} as {list(tensor.shape)}, which does not fit the served model's "
            f"{list(changed.shape)}; it is of another model"
        )


def _tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a directory."""
    shards = weight_files(directory)
    if not shards:
        raise BadCheckpoint(f"{directory} holds no *.safetensors file; write the weights before publishing the version")
    return {name: tensor for shard in shards for name, tensor in read_header(shard).items()}
