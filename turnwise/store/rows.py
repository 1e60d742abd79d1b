"""Conversion between records and rows: how arrays, documents, enums and instants are stored, and their digests.

A record's fields are its columns, so each conversion follows from the field's type. JSON is written as pure ASCII, so
that any text of a client, including lone surrogates and NULs, can be stored in both databases.

A digest of a turn or a reward line is computed from the columns when a row is written, and again by `turnwise verify`.
So a value that was changed later, by mistake or by a damaged file, is found. Somebody who may write to the database can
change a digest too. The HTTP API returns the digests of updates and weights; comparing them with an earlier copy
reveals such a change.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import functools
import hashlib
import json
import operator
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import orjson
import sqlalchemy as sa

from turnwise.parts import digested_parts, pack_parts, unpack_parts
from turnwise.store.schema import policies, policy_versions, rewards, sessions, turns, updates
from turnwise.types import (
    Logprobs,
    Parts,
    Policy,
    PolicyVersion,
    Reward,
    Session,
    SessionStatus,
    TokenIds,
    Turn,
    UpdateRecord,
)

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
StoredRow: TypeAlias = sa.Row[*tuple[Any, ...]]
Convert: TypeAlias = Callable[[Any], Any]
R = TypeVar("R")
T = TypeVar("T")
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)
_DELETE = b"\x7f"
_ONLY_JSON = orjson.OPT_PASSTHROUGH_SUBCLASS | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
dump = json.JSONEncoder(separators=(",", ":")).encode
DIGEST_BYTES = 16
TURN_COLUMNS = (
    *("turn_id", "parent_turn_id", "chain_id", "seq", "step", "dialect", "model"),
    *("messages", "tools", "sampling", "response"),
    *("prompt_delta", "prompt_length", "token_ids", "logprobs", "finish_reason", "outcome", "reason"),
    *("policy_version_first", "policy_version_last", "created_at"),
)
"""Columns of a turn that never change, unlike its role; a turn with parts or a policy has these besides."""
_turn_values = operator.itemgetter(*TURN_COLUMNS)
REWARD_COLUMNS = ("turn_id", "step", "name", "source", "written_by", "created_at")
"""Columns of a reward line beside its value, which is stored as a float."""


def text_if_ascii(document: Any) -> Any:
    """Return the stored text of a turn's document; the document itself if `finish_turn` must encode it.

    A text takes a third of the time of a document to send to another process, and orjson writes it in a tenth of the
    time of `json`. The text is the same but for floats, whose exponents have fewer characters. A turn's documents were
    decoded from JSON and have no NaN, which orjson would write as null.
    """
    try:
        encoded = orjson.dumps(document, option=_ONLY_JSON)
    except TypeError:
        return document
    return encoded.decode() if encoded.isascii() and _DELETE not in encoded else document


def to_micros(instant: datetime.datetime) -> int:
    return (instant - _EPOCH) // _MICROSECOND


def from_micros(micros: int) -> datetime.datetime:
    return _EPOCH + micros * _MICROSECOND


def ids_from_blob(blob: bytes) -> TokenIds:
    return np.frombuffer(blob, _INT32)


def _to_blob(kind: np.dtype[Any], values: TokenIds | Logprobs) -> bytes:
    return values.astype(kind, copy=False).tobytes()


def _storable(text: str) -> str:
    """Return free text without NULs, which PostgreSQL rejects, and lone surrogates, which UTF-8 cannot encode."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode(errors="replace").decode()


def _conversion(kind: Any) -> tuple[Convert, Convert] | None:
    """Return the conversions to and from the stored form of a type; None if values are stored unchanged."""
    if isinstance(kind, types.UnionType):
        (kind,) = (each for each in typing.get_args(kind) if each is not types.NoneType)
    if kind == TokenIds:
        return functools.partial(_to_blob, _INT32), ids_from_blob
    if kind == Parts:
        return pack_parts, unpack_parts
    if kind == Logprobs:
        return functools.partial(_to_blob, _FLOAT32), functools.partial(np.frombuffer, dtype=_FLOAT32)
    if typing.get_origin(kind) in (dict, list):
        return dump, json.loads
    if issubclass(kind, datetime.datetime):
        return to_micros, from_micros
    if kind is bool:
        return int, bool
    if issubclass(kind, enum.StrEnum):
        return operator.attrgetter("_value_"), kind  # `value` calls two functions of `enum`
    return None


class RowFormat(Generic[R]):
    """Converts records of one class to rows of its table and back."""

    def __init__(
        self,
        record: type[R],
        table: sa.Table,
        *,
        joined: tuple[str, ...] = (),
        free_text: tuple[str, ...] = (),
        encode_document: Convert = dump,
        later: tuple[str, ...] = (),
    ) -> None:
        """Determine the conversions from a record's fields, which are the names of the table's columns.

        `joined` are fields from another table, which a row has too; `free_text` has text from an engine or a client;
        `row` leaves those of `later` as they are.
        """
        self._record = record
        kinds = typing.get_type_hints(record)
        names = [field.name for field in dataclasses.fields(typing.cast("Any", record))]
        self._read = [name for name in names if name in table.c or name in joined]
        converted = {name: both for name in names if name in table.c if (both := _conversion(kinds[name])) is not None}
        self.documents = [name for name, both in converted.items() if both[0] is dump]
        self._encoders = [
            (name, encode_document if name in self.documents else both[0]) for name, both in converted.items()
        ]
        self._encoders += [(name, _storable) for name in free_text]
        self._row_encoders = [(name, encode) for name, encode in self._encoders if name not in later]
        self._decoders = [(name, both[1]) for name, both in converted.items()]
        self._values_of = operator.attrgetter(*self._read)

    def row(self, record: R, **extra: Any) -> dict[str, Any]:
        """Return a record as a row; `extra` has the columns that are not fields."""
        row = dict(zip(self._read, self._values_of(record), strict=True))
        for name, encode in self._row_encoders:
            if (value := row[name]) is not None:
                row[name] = encode(value)
        row.update(extra)
        return row

    def values(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        encoders = dict(self._encoders)
        return {
            name: encoders[name](value) if value is not None and name in encoders else value
            for name, value in fields.items()
        }

    def record(self, row: StoredRow, **extra: Any) -> R:
        fields = dict(zip(self._read, self._values_of(row), strict=True))
        for name, decode in self._decoders:
            if fields[name] is not None:
                fields[name] = decode(fields[name])
        return self._record(**fields, **extra)


SESSIONS = RowFormat(Session, sessions)
TURNS = RowFormat(
    Turn,
    turns,
    joined=("session_id", "tenant"),
    free_text=("model", "reason"),
    encode_document=text_if_ascii,
    later=("parts",),
)
"""A row also has its session's `session_id` and `tenant`; `finish_turn` ends it."""
REWARDS = RowFormat(Reward, rewards, joined=("session_id", "tenant"))
POLICIES = RowFormat(Policy, policies)
VERSIONS = RowFormat(PolicyVersion, policy_versions)
UPDATES = RowFormat(UpdateRecord, updates)


def by_key(found: Iterable[StoredRow], key: str, make: Callable[[StoredRow], T]) -> Mapping[int, list[T]]:
    """Return what is made of each row, in order, by the values of a column; a missing value has an empty list."""
    made: dict[int, list[T]] = defaultdict(list)
    for row in found:
        made[getattr(row, key)].append(make(row))
    return made


def session_row(session: Session, group_pk: int | None) -> dict[str, Any]:
    return SESSIONS.row(
        session,
        group_pk=group_pk,
        num_rewards=0,
        num_turns=0,
        num_chains=0,
        status=SessionStatus.OPEN.value,
        last_active_at=to_micros(session.created_at),
    )


def turn_row(turn: Turn, session_pk: int) -> dict[str, Any]:
    row = TURNS.row(turn, session_pk=session_pk)
    finish_turn(row)
    return row


def finish_turn(row: dict[str, Any]) -> None:
    """Encode the documents and parts that `TURNS.row` has left as they are, and set the digest of a turn's row."""
    for name in TURNS.documents:
        if row[name] is not None and type(row[name]) is not str:
            row[name] = dump(row[name])
    if isinstance(row["parts"], dict):
        row["parts"] = pack_parts(row["parts"])
    row["digest"] = turn_digest(row)


def reward_row(reward: Reward, session_pk: int) -> dict[str, Any]:
    row = REWARDS.row(reward, session_pk=session_pk)
    row["digest"] = _digest(b"reward", [float(row["value"]), *(row[column] for column in REWARD_COLUMNS)])
    del row["reward_id"]
    return row


def turn_digest(row: Mapping[str, Any]) -> bytes:
    others = [*(digested_parts(row["parts"]) if row["parts"] else ()), *filter(None, (row["policy_id"],))]
    return _digest(b"turn", (*_turn_values(row), *others) if others else _turn_values(row))


def session_digest(advantages: Mapping[str, float], turn_digests: Mapping[str, bytes | None]) -> bytes | None:
    """Return the digest of a session's trained turns and their advantages; None if one of the turns has no digest."""
    values: list[Any] = []
    for turn_id in sorted(advantages):
        digest = turn_digests.get(turn_id)
        if digest is None:
            return None
        values += [turn_id, digest, float(advantages[turn_id])]
    return _digest(b"session", values)


def batch_digest(sessions: Mapping[tuple[str, str], bytes | None]) -> str | None:
    """Return the digest of an update's sessions, by tenant and id, in hexadecimal; None if one has no digest."""
    if not sessions or None in sessions.values():
        return None
    return _digest(b"batch", (value for key in sorted(sessions) for value in (*key, sessions[key]))).hex()


def _digest(kind: bytes, values: Iterable[Any]) -> bytes:
    """Return the digest of values, each with its type and length, so that neighbours cannot exchange bytes."""
    pieces: list[bytes] = []
    for value in values:
        if isinstance(value, str):
            encoded = value.encode("utf-8", "surrogatepass")
            pieces += (b"s%d:" % len(encoded), encoded)
        elif isinstance(value, bytes):
            pieces += (b"b%d:" % len(value), value)
        else:
            encoded = repr(value).encode()
            pieces += (b"n%d:" % len(encoded), encoded)
    return hashlib.blake2b(b"".join(pieces), digest_size=DIGEST_BYTES, person=kind).digest()
