"""Policy versions on disk: their layout, manifest and digests, and which adapters trainer and proxy refuse.

`v000007/` holds the files that engines load, in the Hugging Face layout, with the manifest `turnwise.json`;
`v000007.trainer/` holds what the trainer resumes from. A directory is written beside its place and renamed, so one with
a final name is complete. The file `latest` names the newest version; the ledger decides which version is served.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnwise.errors import BadCheckpoint
from turnwise.types import PolicyVersion

MANIFEST = "turnwise.json"
"""In each version's directory: version, parent, kind, digests of the weights, probe."""
LATEST = "latest"
STATE_FILE = "state.pt"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
MODEL_CONFIG = "config.json"
TOKENIZER = "tokenizer.json"
WEIGHT_INDEX = "model.safetensors.index.json"
WEIGHTS_PATTERN = "*.safetensors"
TOKENIZER_FILES = (TOKENIZER, "tokenizer.model", "vocab.json", "merges.txt")
"""Files that decide the token ids of a text; a model has some of them."""
DIGESTED_BYTES = 2**20
"""Bytes of each end of a weights file that are read: names and shapes of its tensors, and values."""
ENGINE_ANSWER = "engine_answer"
"""In the metrics of a version that an engine did not compute: `positions` of its probe, and the engine's `logprobs`."""
SHORTEST_PROBE = 2
MAX_CONFIG_BYTES = 2**20
"""Most bytes of an adapter's configuration."""
MAX_JSON_BYTES = 256 * 2**20
"""Most bytes of a JSON file: tokenizers of large vocabularies have tens of MiB."""

_NAME = re.compile(r"v(\d{6,})")
_FACTOR = re.compile(r"\.lora_[AB]\.weight$")
PLAIN_LORA = frozenset(
    {
        *("peft_type", "task_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
        *("r", "lora_alpha", "target_modules", "fan_in_fan_out", "inference_mode", "ensure_weight_tying"),
        *("lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config"),
        *("layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)
"""Fields of an adapter's configuration with which it stays plain LoRA, whatever they say: they name its shape, tell how
it began, or do nothing without another field. Each further field must be off."""
KEEPING_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""How `init_lora_weights` may begin: with any other name PEFT changes the base weights too, at each load."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A text and the trainer's logprob of each token given the tokens before it."""

    token_ids: list[int]
    logprobs: list[float]
    """Logprobs of tokens 1 to N - 1 at temperature 1. [N - 1]"""
    dtype: str = "float32"
    """The least precise numbers among the trainer's computation and the published weights."""
    base: Probe | None = None
    """A text with its logprobs under version 0, which engines start with: it shows what an engine and this trainer
    differ by where nothing was loaded. None if the trainer never had version 0."""

    def positions(self, count: int) -> list[int]:
        """Return at most `count` positions that have a logprob, spread over the text, the last one included."""
        return list(range(len(self.token_ids) - 1, 0, -max(1, -(-(len(self.token_ids) - 1) // count))))


def policy_directory(parent: Path, version: int) -> Path:
    return parent / f"v{version:06d}"


def state_directory(parent: Path, version: int) -> Path:
    return parent / f"v{version:06d}.trainer"


def find_versions(parent: Path) -> list[int]:
    return sorted({int(match[1]) for path in parent.iterdir() if (match := _NAME.match(path.name))})


def on_disk(version: PolicyVersion) -> bool | None:
    """Return whether the version's files exist.

    None if that is unknown, the version is the name of a public model, or its trainer still writes them.
    It reads the file system, which may not answer: call it outside of a transaction, and never on an event loop.
    """
    path = Path(version.path)
    try:
        return path.is_dir() if path.is_absolute() and version.is_written else None
    except OSError:
        return None


def exist_on_disk(found: Iterable[PolicyVersion]) -> dict[int, bool | None]:
    """Return `on_disk` of some versions by their numbers."""
    return {version.version: on_disk(version) for version in found}


def weight_files(directory: Path) -> list[Path]:
    """Return a version's weight files in the order of their names; none where there is no readable directory.

    Raises:
        BadCheckpoint: the directory could not be listed.
    """
    try:
        return sorted(path for path in directory.iterdir() if path.match(WEIGHTS_PATTERN))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []
    except OSError as error:
        raise BadCheckpoint(f"{directory} cannot be listed: {error.strerror}") from error


def read_weight_index(directory: Path) -> dict[str, str]:
    """Return the file of each tensor, from the index of a model in several files; empty for one without an index.

    Raises:
        BadCheckpoint: the index cannot be read.
    """
    path = directory / WEIGHT_INDEX
    files = read_json(path).get("weight_map", {}) if path.exists() else {}
    if not isinstance(files, dict):
        raise BadCheckpoint(f"{path} must hold an object of tensors and files as `weight_map`, not {files!r:.80}")
    return files


def write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    """Write a version's manifest with the digests of its weights.

    Raises:
        BadCheckpoint: the directory holds no weights.
    """
    digests = {path.name: file_digest(path) for path in weight_files(directory)}
    if not digests:
        raise BadCheckpoint(f"{str(directory)!r} holds no {WEIGHTS_PATTERN} file; write the weights first")
    document = json.dumps({**manifest, "sha256": digests}, indent=2)
    (directory / MANIFEST).write_text(document + "\n", encoding="utf-8")


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return a version's manifest; empty for a directory without one.

    Raises:
        BadCheckpoint: it cannot be read.
    """
    path = directory / MANIFEST
    return read_json(path) if path.exists() else {}


def recorded_digests(directory: Path) -> dict[str, str]:
    """Return the digests of a version's weights files by name, from its manifest; none without a manifest."""
    digests = read_manifest(directory).get("sha256", {})
    if not isinstance(digests, dict):
        raise BadCheckpoint(
            f"{directory / MANIFEST} must hold an object of file names and digests, not {digests!r:.80}"
        )
    return digests


def weights_digest(directory: Path) -> str | None:
    """Return one digest of all weights files, from the digests in the manifest; None without a manifest.

    Raises:
        BadCheckpoint: the manifest cannot be read.
    """
    digests = recorded_digests(directory)
    return None if not digests else hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


def compare_digests(directory: Path) -> Iterator[tuple[Path, str | None]]:
    """Yield each weights file that the manifest names, with what is wrong with it; None if nothing is.

    Raises:
        BadCheckpoint: the manifest cannot be read.
    """
    for name, digest in recorded_digests(directory).items():
        file = directory / name
        if not file.is_file():
            yield file, "is missing"
        else:
            found = file_digest(file)
            yield file, None if found == digest else f"has SHA-256 {found[:12]}…, its manifest says {digest[:12]}…"


def read_probe(directory: Path) -> Probe | None:
    """Return the probe of a version, None without one.

    Raises:
        BadCheckpoint: the manifest cannot be read, or its probe lacks something.
    """
    try:
        return probe_from(read_manifest(directory).get("probe"))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadCheckpoint(
            f"{directory / MANIFEST} has a probe without lists `token_ids` and `logprobs`, one logprob for each token "
            "after the first; write both, or no probe"
        ) from error


def probe_from(document: dict[str, Any] | None) -> Probe | None:
    """Return the probe in a manifest or in a trainer's answer; None if it is missing or too short."""
    if document is None or len(document["token_ids"]) < SHORTEST_PROBE:
        return None
    token_ids, logprobs = list(document["token_ids"]), list(document["logprobs"])
    if len(logprobs) != len(token_ids) - 1:
        raise ValueError(f"{len(logprobs)} logprobs for {len(token_ids)} tokens")
    return Probe(
        token_ids,
        logprobs,
        str(document.get("dtype", "float32")),
        probe_from(document.get("base")),
    )


def why_not_plain(config: dict[str, Any], names: Iterable[str]) -> str | None:
    """Return what makes an adapter more than plain LoRA, B · A · alpha / r, which the trainer computes and writes.

    `config` is its `adapter_config.json`, `names` are those of its tensors.
    """
    for field, value in config.items():
        is_off = value is None or value is False or value in ("none", {}, [])
        if field == "init_lora_weights":
            is_off = not isinstance(value, str) or value.lower() in KEEPING_INITS
        if field not in PLAIN_LORA and not is_off:
            return f"has {field}={value!r}"
    strange = sorted(name for name in names if not _FACTOR.search(name))
    return f"holds {len(strange)} tensors that are no factor of LoRA, such as {strange[0]!r}" if strange else None


def base_version(model: str) -> PolicyVersion:
    """Return version 0: the base model as it is, from its directory or by its id."""
    files = local_files(model)
    digest = None if files is None else model_digest(files)
    path = str(Path(model).resolve()) if Path(model).is_dir() else model
    return PolicyVersion(version=0, path=path, model_digest=digest)


def model_digest(directory: Path) -> str | None:
    """Return a digest of tokenizer and weights, the same in each copy of a model; None without weights.

    Of a weights file only the size and both ends are read, so that a large model costs no start seconds.
    """
    weights = weight_files(directory)
    if not weights:
        return None
    found = hashlib.sha256()
    for path in (directory / name for name in TOKENIZER_FILES):
        found.update(f"{path.name} {file_digest(path) if path.is_file() else None}\n".encode())
    for path in weights:
        size = path.stat().st_size
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            found.update(file.read(DIGESTED_BYTES))
            file.seek(max(0, size - DIGESTED_BYTES))
            found.update(file.read())
    return found.hexdigest()


def local_files(model: str) -> Path | None:
    """Return the directory with a model's files: its own, or that of its id in the local cache; None without one."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    try:
        found = try_to_load_from_cache(model, MODEL_CONFIG)
    except ValueError:  # neither a directory nor an id
        return None
    return Path(found).parent if isinstance(found, str) else None


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def regular_file(path: Path) -> Path:
    """Return the path of a regular file: a pipe or a device may give no byte, or bytes without an end.

    Raises:
        BadCheckpoint: it is something else, or missing.
    """
    try:
        mode = path.stat().st_mode
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}; the directory needs this file") from error
    if not stat.S_ISREG(mode):
        raise BadCheckpoint(f"{path} is no regular file; publish a directory with the files of a version")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        BadCheckpoint: it cannot be read, or holds something else.
    """
    try:
        limit = MAX_CONFIG_BYTES if path.name == ADAPTER_CONFIG else MAX_JSON_BYTES
        if (size := regular_file(path).stat().st_size) > limit:
            raise BadCheckpoint(f"{path} has {size} bytes; the limit for this file is {limit}")
        decoded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}; the directory needs this file") from error
    except (ValueError, RecursionError) as error:
        raise BadCheckpoint(f"{path} is not JSON: {error}") from error
    if not isinstance(decoded, dict):
        raise BadCheckpoint(f"{path} must hold a JSON object")
    return decoded
