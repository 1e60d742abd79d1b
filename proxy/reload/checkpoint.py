"""Checks on a checkpoint directory before an engine is asked to load it.

A bad directory can kill an engine, so what can be known without the engine is known first, in two steps: `check_policy`
reads headers only and is quick enough for a request, `check_values` reads every byte and runs before a reload, while
calls still flow. Tensors are compared with those of the model that is served, where its directory is readable here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

from proxy.reload.safetensors_header import FLOATS, Tensor, find_not_finite, read_header
from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyKind

MANIFEST = "turnwise.json"
"""What a trainer leaves beside the weights: digests of the files, and a probe."""
ADAPTER_WEIGHTS = "adapter_model.safetensors"
SHORTEST_PROBE = 2
"""Tokens; the first has no logprob."""
TIED = "lm_head.weight"
"""Written by some and left out by others where a model's output weights are its input embeddings."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """What the trainer saw: a text, and the logprob of each of its tokens after the ones before."""

    token_ids: list[int]
    """The text. [N]"""
    logprobs: list[float]
    """Of tokens 1 to N - 1 given those before, at temperature 1. [N - 1]"""

    def positions(self, count: int) -> list[int]:
        """Return at most so many positions in the text that have a logprob, spread over it, its last among them."""
        return list(range(len(self.token_ids) - 1, 0, -max(1, -(-(len(self.token_ids) - 1) // count))))


def check_policy(path: str, kind: PolicyKind, model_path: str | None = None) -> None:
    """Check what a directory says it holds, against itself and against the model that is served.

    Args:
        path: the directory of the version.
        kind: whether it holds a whole model or an adapter.
        model_path: where the engine has its model from; compared with where that is a directory here.

    Raises:
        BadCheckpoint: naming the file or tensor and what is wrong with it.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise BadCheckpoint(f"{path!r} is no directory; publish the one that holds the version's *.safetensors files")
    served = Path(model_path) if model_path and any(Path(model_path).glob("*.safetensors")) else None
    if kind is PolicyKind.LORA:
        _check_adapter(directory, served)
    else:
        _check_model(directory, served)


def check_values(path: str) -> None:
    """Read all weights: no NaN, no infinity, and the bytes that the manifest was written for, where there is one.

    Raises:
        BadCheckpoint: naming the file or tensor.
    """
    directory = Path(path)
    for name, digest in _manifest(directory).get("sha256", {}).items():
        file = directory / name
        if not file.is_file() or _digest(file) != digest:
            raise BadCheckpoint(f"{file} is missing or was changed after its digest was written; publish it anew")
    for shard in sorted(directory.glob("*.safetensors")):
        name = find_not_finite(shard, read_header(shard))
        if name is not None:
            raise BadCheckpoint(f"{shard} holds a value in {name!r} that is infinite or no number; the update diverged")


def read_probe(path: str) -> Probe | None:
    """Return the probe that a trainer left beside the weights, None without one."""
    probe = _manifest(Path(path)).get("probe")
    if probe is None or len(probe["token_ids"]) < SHORTEST_PROBE:
        return None
    return Probe(list(probe["token_ids"]), list(probe["logprobs"]))


def _check_model(directory: Path, served: Path | None) -> None:
    config = _read_json(directory / "config.json")
    tensors = _tensors(directory)
    index = directory / "model.safetensors.index.json"
    named = set(_read_json(index).get("weight_map", {})) if index.exists() else set()
    if missing := named - tensors.keys():
        raise BadCheckpoint(f"{directory} lacks {len(missing)} tensors that its index names, such as {min(missing)!r}")
    if served is not None:
        theirs = _read_json(served / "config.json")
        _check_same_architecture(directory, config, theirs)
        _check_same_tensors(directory, tensors, _tensors(served), tied=bool(theirs.get("tie_word_embeddings")))


def _check_same_architecture(directory: Path, config: dict[str, Any], served: dict[str, Any]) -> None:
    for field in ("model_type", "architectures"):
        if field in config and field in served and config[field] != served[field]:
            raise BadCheckpoint(
                f"{directory} is of another architecture: its {field} is {config[field]!r}, the engine serves "
                f"{served[field]!r}; publish a checkpoint of the served model, or start the engine with this one"
            )


def _check_same_tensors(directory: Path, tensors: dict[str, Tensor], served: dict[str, Tensor], *, tied: bool) -> None:
    optional = {TIED} if tied else set()
    if missing := served.keys() - tensors.keys() - optional:
        raise BadCheckpoint(f"{directory} lacks {len(missing)} tensors of the served model, such as {min(missing)!r}")
    if strange := tensors.keys() - served.keys() - optional:
        raise BadCheckpoint(
            f"{directory} has {len(strange)} tensors that the served model has not, such as {min(strange)!r}"
        )
    for name in tensors.keys() & served.keys():
        new, old = tensors[name], served[name]
        if new.shape != old.shape or (new.dtype != old.dtype and not {new.dtype, old.dtype} <= FLOATS):
            raise BadCheckpoint(
                f"{directory} has {name!r} as {new.dtype}{list(new.shape)}, the served model as "
                f"{old.dtype}{list(old.shape)}; it is of another architecture"
            )


def _check_adapter(directory: Path, served: Path | None) -> None:
    config = _read_json(directory / "adapter_config.json")
    if config.get("peft_type") != "LORA" or not isinstance(config.get("r"), int):
        raise BadCheckpoint(
            f"{directory} holds no LoRA adapter: peft_type {config.get('peft_type')!r}, r {config.get('r')!r}"
        )
    tensors = read_header(directory / ADAPTER_WEIGHTS)
    if not tensors:
        raise BadCheckpoint(f"{directory / ADAPTER_WEIGHTS} holds no tensor; write the adapter before publishing it")
    base = {} if served is None else _tensors(served)
    for name, tensor in tensors.items():
        _check_adapter_tensor(directory, name, tensor, base)


def _check_adapter_tensor(directory: Path, name: str, tensor: Tensor, base: dict[str, Tensor]) -> None:
    """Check that a factor fits the matrix that it changes: A is [rank, in], B is [out, rank]."""
    module, _, factor = name.removeprefix("base_model.model.").partition(".lora_")
    if not base or not factor.startswith(("A.", "B.")):
        return
    changed = base.get(f"{module}.weight")
    if changed is None:
        raise BadCheckpoint(f"{directory} adapts {module!r}, which the served model has not; it is of another model")
    axis = 1 if factor.startswith("A.") else 0
    if len(tensor.shape) != 2 or tensor.shape[axis] != changed.shape[axis]:
        raise BadCheckpoint(
            f"{directory} has {name!r} as {list(tensor.shape)}, which does not fit the served model's "
            f"{list(changed.shape)}; it is of another model"
        )


def _tensors(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of all files of a directory."""
    shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        raise BadCheckpoint(f"{directory} holds no *.safetensors file; write the weights before publishing the version")
    return {name: tensor for shard in shards for name, tensor in read_header(shard).items()}


def _manifest(directory: Path) -> dict[str, Any]:
    return _read_json(directory / MANIFEST) if (directory / MANIFEST).exists() else {}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    try:
        decoded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCheckpoint(
            f"{path} cannot be read: {error.strerror}; write it before publishing the version"
        ) from error
    except ValueError as error:
        raise BadCheckpoint(f"{path} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise BadCheckpoint(f"{path} must hold a JSON object")
    return decoded
