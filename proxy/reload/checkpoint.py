"""Which files of a version are refused before an engine loads them, read within limits of time.

Loading a broken directory can crash an engine. `check_headers` reads headers only and is fast enough for a request;
`check_values` reads every byte and runs before a reload, while calls continue. Tensors are compared with those of the
served model, where its directory is readable here. The library safetensors is not used: it maps a file into memory,
and an error of a network file system, or a file that becomes shorter, then ends the process with SIGBUS.

`VersionFiles` reads in separate daemon threads, so a read that never ends blocks neither the event loop nor the exit of
the process. Callers wait for a limited time and ask again later: the read goes on, and no second one starts beside it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from turnwise.errors import BadCheckpoint, FilesNotRead, ReloadFailed
from turnwise.processes.limited import call_in_daemon_thread
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
    why_not_plain,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

LENGTH_BYTES = 8
"""A file starts with its header's length, little-endian."""
LARGEST_HEADER_BYTES = 100 * 2**20
"""The format's own limit."""
CHUNK_BYTES = 64 * 2**20
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
EXPONENT = {"F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80), "F32": (np.uint32, 0x7F800000)}
"""Integer type and exponent mask; if all exponent bits are set, the value is infinite or NaN."""
HEAD = "lm_head.weight"
CONTAINERS = re.compile(r"^(?:(?:model|language_model|text_model)\.)+")
"""The beginning of names of tensors of the language model."""
EMBEDDINGS = "embed_tokens.weight"
PACKED = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4", "_packed")
"""Ends of names of tensors that stand beside, or for, a matrix that is stored packed."""


PATIENCE_SECONDS = 1.0
"""How long a caller waits for a read before it does its other work; the read goes on."""
LONG_SECONDS = 60.0
"""How often a read that goes on is logged, and how long its result is kept for a caller that asks again."""
RETRY_SECONDS = 5.0
"""How long after an error of `NO_ANSWER` files are read again."""
NO_ANSWER = frozenset(
    {errno.ETIMEDOUT, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN}
)
"""Errors of a network file system whose server does not answer; they say nothing about the files."""
WRONG_FILE = frozenset(
    {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM}
)
"""Errors that a file gives at each read; others, such as EIO or too many open files, may pass."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, as its file's header describes it."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name, after checking the header against itself and the file's size."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(LARGEST_HEADER_BYTES, size - LENGTH_BYTES):
                raise BadCheckpoint(
                    f"{path} is not a safetensors file: its header would be {length} of its {size} bytes"
                )
            header: dict[str, Any] = json.loads(file.read(length))
            header.pop("__metadata__", None)
        start = LENGTH_BYTES + length
        tensors = {name: _tensor(path, name, entry, start) for name, entry in header.items()}
    except OSError as error:
        raise BadCheckpoint(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise BadCheckpoint(f"{path} has a broken header: {error!r}") from error
    end = max((tensor.end for tensor in tensors.values()), default=start)
    if end != size:
        raise BadCheckpoint(f"{path} has {size} bytes where its header says {end}; it is truncated, write it again")
    return tensors


def _tensor(path: Path, name: str, entry: dict[str, Any], start: int) -> Tensor:
    dtype, shape = str(entry["dtype"]), tuple(int(length) for length in entry["shape"])
    begin, end = entry["data_offsets"]
    needed = math.prod(shape) * ITEM_BYTES.get(dtype, 0)
    if dtype in ITEM_BYTES and end - begin != needed:
        raise BadCheckpoint(
            f"{path} has a broken header: {name!r} {dtype}{list(shape)} takes {needed} bytes, not {end - begin}"
        )
    return Tensor(dtype, shape, start + begin, start + end)


def find_not_finite(path: Path, tensors: dict[str, Tensor]) -> str | None:
    """Return the name of a tensor that holds a NaN or an infinity, None when there is none; reads the whole file."""
    with path.open("rb") as file:
        for name, tensor in tensors.items():
            if tensor.dtype not in EXPONENT:
                continue
            kind, exponent = EXPONENT[tensor.dtype]
            file.seek(tensor.begin)
            left = tensor.end - tensor.begin
            while left:
                part = file.read(min(left, CHUNK_BYTES))
                if not part:
                    raise BadCheckpoint(f"{path} ends in {name!r}: it was truncated after its header was read")
                bits = np.frombuffer(part, kind)
                if bool(((bits & kind(exponent)) == exponent).any()):
                    return name
                left -= bits.nbytes
    return None


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
    base = {_inner(name): tensor for name, tensor in base.items()}
    for name, tensor in tensors.items():
        _check_adapter_tensor(directory, name, tensor, base)


def _inner(name: str) -> str:
    """Return a tensor's name without the containers of the language model, which files and modules order differently.

    Engines map both orders: `model.language_model.layers.0…` and `language_model.model.layers.0…`.
    """
    return CONTAINERS.sub("", name)


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


class _Reading:
    """One read, and its result once it has ended."""

    def __init__(self, path: str, read: Callable[[], Any]) -> None:
        self.path = path
        self.ended = asyncio.Event()
        self.started_at = self.logged_at = time.monotonic()
        self.outdated_at = math.inf
        """When another read is to start, on the monotonic clock: some time after this one has ended."""
        self.result: Any = None
        self.error: BaseException | None = None
        self.read_error: OSError | None = None
        """The error of the system that ended the read, also as the cause of a `BadCheckpoint`; None without one."""
        call_in_daemon_thread("version-files", read, self._end)

    @property
    def has_no_answer(self) -> bool:
        return self.read_error is not None and self.read_error.errno in NO_ANSWER

    def _end(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        cause = error.__cause__ if isinstance(error, BadCheckpoint) else error
        self.read_error = cause if isinstance(cause, OSError) else None
        self.outdated_at = time.monotonic() + (RETRY_SECONDS if self.has_no_answer else LONG_SECONDS)
        self.ended.set()
        if self.has_no_answer:
            log.warning("the file system of %r does not answer, trying again: %s", self.path, self.read_error)


class VersionFiles:
    """Reads versions' files, each once at a time."""

    def __init__(self) -> None:
        self._readings: dict[tuple[str, ...], _Reading] = {}
        """Running reads, and finished ones whose result was not fetched yet; keyed by what they read."""

    @property
    def problem(self) -> str | None:
        """Which files take long to read; None if none do."""
        for reading in self._readings.values():
            seconds = time.monotonic() - reading.started_at
            if not reading.ended.is_set() and seconds >= LONG_SECONDS:
                return _not_read(reading.path, seconds)
        return None

    def is_reading(self, path: str) -> bool:
        return any(one.path == path and not one.ended.is_set() for one in self._readings.values())

    async def read(self, key: tuple[str, ...], path: str, read: Callable[[], T], *, seconds: float | None) -> T:
        """Return what a function, called in a thread, reads in a directory.

        A second call with the same key waits for the same read. Without `seconds` the wait has no limit.

        Raises:
            FilesNotRead: It goes on, or the file system does not answer; call again.
            ReloadFailed: A file could not be read, which may pass.
            Exception: What `read` raised, such as BadCheckpoint (a file is missing or wrong) or Conflict.
        """
        reading = self._readings.get(key)
        now = time.monotonic()
        if reading is None or now >= reading.outdated_at:
            self._readings = {name: other for name, other in self._readings.items() if now < other.outdated_at}
            reading = self._readings[key] = _Reading(path, read)
        try:
            async with asyncio.timeout(seconds):
                await reading.ended.wait()
        except TimeoutError as error:
            raise FilesNotRead(_noted(reading)) from error
        if reading.has_no_answer:
            raise FilesNotRead(f"the file system of {path!r} does not answer: {reading.read_error}") from reading.error
        self._readings.pop(key, None)
        failed = reading.read_error
        if failed is not None and (failed is reading.error or failed.errno not in WRONG_FILE):
            raise ReloadFailed(f"a file in {path!r} could not be read: {failed}", is_transient=True) from reading.error
        if reading.error is not None:
            raise reading.error
        result: T = reading.result
        return result


def _noted(reading: _Reading) -> str:
    """Return a sentence that a read goes on; log it every `LONG_SECONDS`."""
    now = time.monotonic()
    text = _not_read(reading.path, now - reading.started_at)
    if now - reading.logged_at >= LONG_SECONDS:
        reading.logged_at = now
        log.warning("%s", text)
    return text


def _not_read(path: str, seconds: float) -> str:
    return (
        f"the files in {path!r} have been read for {seconds:.0f} s and are not complete; the engines serve what they "
        "have. If this does not end, check that the file system answers"
    )
