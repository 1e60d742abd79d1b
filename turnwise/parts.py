"""What a turn has beside its tokens: parts, each the bytes of one feature, stored together and read by name.

Columns, rows, chains and experiences know a part's name alone. What its bytes mean, how those of a path are joined and
what the API shows of them stands with its feature, which `turnwise.features` lists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from turnwise.errors import StoreError
from turnwise.types import Json, Parts, Turn

Joined: TypeAlias = Mapping[str, Any]
"""The parts of a chain by name, as `Part.join` returns them."""
Loaded: TypeAlias = Mapping[str, Any]
"""What `Part.load` has read of one session, by the part's name."""
Keys: TypeAlias = npt.NDArray[np.integer[Any]]
HEADER_BYTES = 256
"""So many bytes of packed parts begin with their names: a table of a few short ones."""


class PartProblem(ValueError):
    """A turn is stored without a part, because what the engine said of it cannot be read; `reason` names the kind."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Part:
    """One kind of part; a method that it does not override says that there is nothing to do."""

    name: str
    is_of_prompt = False
    """Whether a turn keeps it where its reply is replaced by another one."""
    is_always_shown = True
    """Whether an experience's JSON has its fields where there is none."""
    fields: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """The fields of a turn's JSON, each with its type and what it means."""
    joined_fields: ClassVar[Mapping[str, str]] = {}
    """What it is in an experience's JSON, or in an export, by the field's name."""
    json_bytes = 1
    """Bytes of a turn's JSON for a stored byte."""
    column: str | None = None
    """The column of turns that had it before 0.2, where turns had no parts yet."""
    reply_field: str | None = None
    """The field of a choice of the engine's reply, a text, that it is packed from; the client does not get it."""
    is_text = False
    """Whether it is ASCII text, and was in that column."""
    is_digested = True
    """Whether the turn's digest covers it."""

    def pack(self, given: Any, row: Mapping[str, Any]) -> bytes | None:
        """Return the stored form of what capture has `given` of a turn; the row has the reply's encoded values.

        Raises:
            PartProblem: it cannot be read; the turn is stored without it.
        """
        raise NotImplementedError

    def load(
        self,
        conn: Any,
        sessions: Sequence[Any],
        turns: Mapping[int, Sequence[Turn]],
        *,
        with_files: bool,
    ) -> Mapping[int, Any]:
        """Return what `join` needs beside the turns of sessions; by the session's key, as the turns are."""
        return {}

    def join(self, path: Sequence[Turn], trained: Collection[str], loaded: Any) -> Any:
        """Return the part of a chain, of which these turns are trained; None without one."""
        return None

    def as_root(self, path: Sequence[Turn]) -> bytes | None:
        """Return the part of a path's last turn where it has its whole prompt, and no parent."""
        return path[-1].parts.get(self.name)

    def tell_apart(self, keys: Keys, joined: Any) -> Keys:
        """Return keys that differ where equal token ids stand for different things. [L]."""
        return keys

    def of_turn(self, packed: bytes | None) -> Json:
        """Return the fields of a turn's JSON."""
        return {}

    def of_experience(self, joined: Any, experience: Any) -> Json:
        """Return the fields of an experience's JSON."""
        return {}

    def problems(self, turn: Turn) -> list[tuple[str, str]]:
        """Return which of a stored turn's fields are wrong, and how."""
        return []


known: dict[str, Part] = {}
"""The parts by name, in the order in which they are stored and shown."""
reply_fields: dict[str, str] = {}
"""The names of parts by the field of an engine's choice that they are packed from."""


def use(parts: Iterable[Part]) -> None:
    """Let this process read these parts and no others, in this order; `turnwise.features` calls it with its tuple."""
    known.clear()
    known.update({each.name: each for each in parts})
    reply_fields.clear()
    reply_fields.update({each.reply_field: name for name, each in known.items() if each.reply_field is not None})


def part(name: str) -> Part:
    """Return the part of a name.

    Raises:
        StoreError: no feature of this process knows it.
    """
    found = known.get(name)
    if found is None:
        raise StoreError(
            f"a stored turn has {name!r}, which no feature of this process reads; import `turnwise.features`, or "
            "install the version of Turnwise that stored it"
        )
    return found


def pack_parts(parts: Parts) -> bytes:
    """Return parts as they are stored: a line with their names and lengths, then their bytes; empty without one."""
    if not parts:
        return b""
    header = ",".join(f"{name}:{len(packed)}" for name, packed in parts.items())
    return b"".join((header.encode(), b"\n", *parts.values()))


def unpack_parts(stored: bytes) -> Parts:
    header, _, rest = stored.partition(b"\n")
    parts, start = {}, 0
    for name, length in _lengths(header):
        parts[name] = rest[start : start + length]
        start += length
    return parts


def digested_parts(stored: bytes) -> list[str | bytes]:
    """Return what the digest of a turn covers of its packed parts."""
    found = [(part(name), packed) for name, packed in unpack_parts(stored).items()]
    return [packed.decode() if each.is_text else packed for each, packed in found if each.is_digested]


def sizes_of(beginning: bytes | None) -> dict[str, int]:
    """Return the lengths of packed parts by name, from their first `HEADER_BYTES`; SQLite's of none are None."""
    return dict(_lengths((beginning or b"").partition(b"\n")[0]))


def _lengths(header: bytes) -> Iterable[tuple[str, int]]:
    for entry in header.decode().split(",") if header else ():
        name, _, length = entry.partition(":")
        yield name, int(length)


def load_parts(
    conn: Any, sessions: Sequence[Any], turns: Mapping[int, Sequence[Turn]], *, with_files: bool
) -> Mapping[int, Loaded]:
    """Return what the parts of sessions need beside their turns, by the session's key, as the turns are."""
    loaded: dict[int, dict[str, Any]] = {session.session_pk: {} for session in sessions}
    for name, each in known.items():
        for session_pk, found in each.load(conn, sessions, turns, with_files=with_files).items():
            loaded[session_pk][name] = found
    return loaded


def join_parts(path: Sequence[Turn], trained: Collection[str], loaded: Loaded) -> Joined:
    """Return the parts of a path by name, as far as there are any.

    Raises:
        StoreError: a turn has a part that no feature of this process knows.
    """
    names = {name for turn in path for name in turn.parts} | loaded.keys()
    for name in names:
        part(name)
    found = {name: each.join(path, trained, loaded.get(name)) for name, each in known.items() if name in names}
    return {name: joined for name, joined in found.items() if joined is not None}


def root_parts(path: Sequence[Turn]) -> Parts:
    """Return the parts of a path's last turn where it has its whole prompt, and no parent."""
    found = {name: each.as_root(path) for name, each in known.items() if any(name in turn.parts for turn in path)}
    return {name: packed for name, packed in found.items() if packed is not None}


def json_size(beginning: bytes | None) -> int:
    """Return roughly the bytes of JSON of packed parts, from their first `HEADER_BYTES`."""
    return sum(size * part(name).json_bytes for name, size in sizes_of(beginning).items())


def turn_fields(parts: Parts) -> Json:
    """Return the fields of a turn's JSON that show its parts."""
    return {field: value for name, each in known.items() for field, value in each.of_turn(parts.get(name)).items()}
