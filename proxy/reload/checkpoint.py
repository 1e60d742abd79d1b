"""Which files of a version are refused before an engine loads them; the reading process calls these functions.

Loading a broken directory can crash an engine. `check_headers` reads headers only and is fast enough for a request;
`check_values` reads every byte and runs before a reload, while calls continue. Tensors are compared with those of the
served model, where its directory is readable there.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

from proxy.reload.adapter_shape import FLOATS, why_misread
from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyKind, PolicyVersion
from turnwise.version_directory import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    MANIFEST,
    MODEL_CONFIG,
    TOKENIZER,
    base_version,
    compare_digests,
    file_digest,
    read_json,
    read_weight_index,
    regular_file,
    weight_files,
    why_not_plain,
)

LENGTH_BYTES = 8
"""A file starts with its header's length, little-endian."""
CHUNK_BYTES = 64 * 2**20
EXPONENT = {"F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80), "F32": (np.uint32, 0x7F800000)}
"""Integer type and exponent mask; if all exponent bits are set, the value is infinite or NaN."""
MOVING = {"F16": 5 << 10, "BF16": 117 << 7, "F32": 117 << 23}
"""The bits of 2 ** -10, about a thousandth: an adapter with such a value changes logprobs in every number format."""
HEAD = "lm_head.weight"
CONTAINERS = re.compile(r"^(?:(?:model|language_model|text_model)\.)+")
"""The beginning of names of tensors of the language model."""
PARTS = frozenset({"text_config", "vision_config", "audio_config", "thinker_config"})
"""Fields in the configuration of a model whose language model is one of several parts."""
SEVERAL = re.compile(r"(?:.*\.)?(?:language_model|text_model)\.")
EMBEDDINGS = "embed_tokens.weight"
PACKED = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", "_packed")
"""Ends of names of tensors that stand beside, or for, a matrix that is stored packed."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, as its file's header describes it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name, after the library has checked the header against the file's size.

    Every weights file of unknown origin is read here first.
    """
    try:
        with regular_file(path).open("rb") as file, safe_open(path, "numpy"):
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            header = json.loads(file.read(length))
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror or error}") from error
    except (SafetensorError, ValueError) as error:
        raise BadCheckpoint(f"{path} is not a whole safetensors file: {error}; write it again") from error
    header.pop("__metadata__", None)
    start = LENGTH_BYTES + length
    return {name: _tensor(entry, start) for name, entry in header.items()}


def _tensor(entry: dict[str, Any], start: int) -> Tensor:
    begin, end = entry["data_offsets"]
    return Tensor(entry["dtype"], tuple(entry["shape"]), start + begin, start + end)


def find_not_finite(path: Path, tensors: dict[str, Tensor]) -> str | None:
    """Return the name of a tensor that holds a NaN or an infinity, None when there is none; reads the whole file."""
    for name, bits in _bits(path, tensors):
        exponent = EXPONENT[tensors[name].dtype][1]
        if bool(((bits & exponent) == exponent).any()):
            return name
    return None


def _bits(path: Path, tensors: dict[str, Tensor]) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield parts of the tensors in a format of `EXPONENT` as integers, with their names."""
    with path.open("rb") as file:
        for name, tensor in tensors.items():
            if tensor.dtype not in EXPONENT:
                continue
            file.seek(tensor.begin)
            left = tensor.end - tensor.begin
            while left:
                part = file.read(min(left, CHUNK_BYTES))
                if not part:
                    raise BadCheckpoint(f"{path} ends in {name!r}: it was truncated after its header was read")
                yield name, np.frombuffer(part, EXPONENT[tensor.dtype][0])
                left -= len(part)


def check_version(path: str, kind: PolicyKind, model_path: str | None) -> None:
    """Check a whole directory before an engine loads it."""
    check_headers(path, kind, model_path)
    check_tokenizer(path, model_path)
    check_values(path)


def check_published(path: str, kind: PolicyKind, model_path: str | None, *, is_start: bool) -> None:
    """Check the headers of a directory that somebody publishes, or starts a policy from."""
    try:
        check_headers(path, kind, model_path)
        if is_start:
            check_trainable(path)
    except OSError as error:
        raise BadCheckpoint(f"{path[:200]!r} cannot be read: {error.strerror}; publish a directory") from error


def own_model(path: str) -> tuple[PolicyVersion, bool]:
    """Return the model that an engine was started with as a version, and whether it is one that was published."""
    found = base_version(path)
    return found, (Path(found.path) / MANIFEST).exists()


def check_headers(path: str, kind: PolicyKind, model_path: str | None = None) -> None:
    """Check a directory's headers for consistency, and against the served model if its directory is readable here.

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


def check_trainable(path: str) -> None:
    """Check that an adapter is what the trainer computes and writes again, so that a policy can start from it.

    Raises:
        BadCheckpoint: naming the field or the tensor.
    """
    directory = Path(path)
    reason = why_not_plain(read_json(directory / ADAPTER_CONFIG), read_header(directory / ADAPTER_WEIGHTS))
    if reason is not None:
        raise BadCheckpoint(
            f"the adapter {path!r} {reason}, and a policy starts from plain LoRA: train it without that, or merge it "
            "into the model and serve the result"
        )


def adapter_digest(path: str) -> str:
    """Return one digest of all that an engine reads of an adapter: its configuration and its weights.

    Raises:
        BadCheckpoint: a file cannot be read, or is no regular file.
    """
    found = hashlib.sha256()
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        file = regular_file(Path(path, name))
        try:
            found.update(f"{name} {file_digest(file)}\n".encode())
        except OSError as error:
            raise BadCheckpoint(f"{file} cannot be read: {error.strerror or error}") from error
    return found.hexdigest()


def moves_model(path: str) -> bool:
    """Return whether a factor B of an adapter has a value that is far enough from 0 to be seen in logprobs."""
    file = Path(path, ADAPTER_WEIGHTS)
    factors = {name: tensor for name, tensor in read_header(file).items() if ".lora_B." in name}
    return any(
        bool(((bits & (np.iinfo(bits.dtype).max >> 1)) >= MOVING[factors[name].dtype]).any())
        for name, bits in _bits(file, factors)
    )


def check_values(path: str) -> None:
    """Read all weights: they hold no NaN or infinity, and match the digests of the manifest where there is one."""
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
    if config.get("peft_type") != "LORA":
        raise BadCheckpoint(f"{directory} is not a LoRA adapter: peft_type {config.get('peft_type')!r}")
    tensors = read_header(directory / ADAPTER_WEIGHTS)
    if not tensors:
        raise BadCheckpoint(f"{directory / ADAPTER_WEIGHTS} holds no tensor; write the adapter before publishing it")
    if (reason := why_misread(config, tensors)) is not None:
        raise BadCheckpoint(f"the adapter {str(directory)!r} {reason}")
    base = {} if served is None else _tensors(served)
    if served is not None:
        _check_containers(directory, tensors, base, read_json(served / MODEL_CONFIG))
    embeddings = next((tensor for name, tensor in base.items() if name.endswith(EMBEDDINGS)), None)
    if served is not None and embeddings and read_json(served / MODEL_CONFIG).get("tie_word_embeddings"):
        base.setdefault(HEAD, embeddings)
    base = {_inner(name): tensor for name, tensor in base.items()}
    for name, tensor in tensors.items():
        _check_adapter_tensor(directory, name, tensor, base)


def _inner(name: str) -> str:
    """Return a tensor's name without the containers of the language model, which files and modules order differently.

    Engines map both orders: `model.language_model.layers.0…` and `language_model.model.layers.0…`.
    """
    return CONTAINERS.sub("", name)


def _check_containers(
    directory: Path, adapted: dict[str, Tensor], base: dict[str, Tensor], config: dict[str, Any]
) -> None:
    """Check that names have no container that a model of texts alone has not: an engine would skip these tensors."""
    if PARTS & config.keys() or any(SEVERAL.match(name) for name in base):
        return
    inside = {_inner(name): name for name in base}
    for name in adapted:
        module, found, _ = name.removeprefix("base_model.model.").partition(".lora_")
        actual = inside.get(_inner(f"{module}.weight"))
        if found and actual is not None and actual.startswith("model.") and actual != f"{module}.weight":
            raise BadCheckpoint(
                f"{directory} adapts {module!r}, and the served model calls it {actual.removesuffix('.weight')!r}: an "
                "engine would serve the model without it; rename the adapter's tensors"
            )


def _check_adapter_tensor(directory: Path, name: str, tensor: Tensor, base: dict[str, Tensor]) -> None:
    """Check that a factor fits the matrix that it changes: A is [rank, in], B is [out, rank].

    Of a matrix that is stored packed the sizes are unknown.
    """
    module, _, factor = name.removeprefix("base_model.model.").partition(".lora_")
    if not base or not factor.startswith(("A.", "B.")):
        return
    weight = _inner(f"{module}.weight")
    if any(f"{weight}{end}" in base for end in PACKED):
        return
    changed = base.get(weight)
    if changed is None:
        raise BadCheckpoint(f"{directory} adapts {module!r}, which the served model lacks; it is of another model")
    axis = 1 if factor.startswith("A.") else 0
    if len(tensor.shape) != 2 or tensor.shape[axis] != changed.shape[axis]:
        raise BadCheckpoint(
            f"{directory} has {name!r} as {list(tensor.shape)}, which does not fit the served model's "
            f"{list(changed.shape)}; it is of another model"
        )


def _tensors(directory: Path) -> dict[str, Tensor]:
    shards = weight_files(directory)
    if not shards:
        raise BadCheckpoint(f"{directory} holds no *.safetensors file; write the weights before publishing the version")
    return {name: tensor for shard in shards for name, tensor in read_header(shard).items()}
