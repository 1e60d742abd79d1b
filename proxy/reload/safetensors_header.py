"""The header of a safetensors file: names, dtypes, shapes and offsets, read without loading the tensors.

The format is 8 bytes of length, a JSON header, and the tensors without gaps. A truncated file, or one of another
format, is recognised by its sizes; values are read only to find NaN and infinity.

The library safetensors is not used: it maps a file into memory, and an error of a network file system, or a file that
becomes shorter, then ends the process with SIGBUS instead of an exception.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from turnwise.errors import BadCheckpoint

LENGTH_BYTES = 8
"""A file starts with its header's length, little-endian."""
LARGEST_HEADER_BYTES = 100 * 2**20
"""The format's own limit."""
CHUNK_BYTES = 64 * 2**20
"""Bytes read at once when values are checked."""
ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 1),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 2),
    **dict.fromkeys(("U32", "I32", "F32"), 4),
    **dict.fromkeys(("U64", "I64", "F64"), 8),
}
"""Bytes of one number by dtype."""
FLOATS = frozenset({"F16", "BF16", "F32", "F64"})
"""Dtypes that an engine converts into each other."""
EXPONENT = {"F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80), "F32": (np.uint32, 0x7F800000)}
"""Integer type and exponent mask; if all exponent bits are set, the value is infinite or NaN."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor, as its file's header describes it."""

    dtype: str
    """As the format writes it: F32, BF16, …"""
    shape: tuple[int, ...]
    begin: int
    """Offset of its first byte in the file."""
    end: int


def read_header(path: Path) -> dict[str, Tensor]:
    """Return the tensors of one file by name, after checking the header against itself and the file's size.

    Raises:
        BadCheckpoint: the file is missing, truncated, or not a safetensors file.
    """
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
    """Return the name of a tensor that holds a NaN or an infinity, None when there is none; reads the whole file.

    Raises:
        BadCheckpoint: the file became shorter meanwhile.
    """
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
