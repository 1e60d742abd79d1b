"""Digests of what is stored: a turn, a reward line, and the turns that an update trained.

A digest is computed from the columns when a row is written, and again by `turnwise verify`. So a value that was changed
later, by mistake or by a damaged file, is found. Somebody who may write to the database can change a digest too. The
HTTP API returns the digests of updates and weights; comparing them with an earlier copy reveals such a change.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from typing import Any

SIZE = 16
"""Bytes of a digest: BLAKE2b with 128 bits."""
TURN_COLUMNS = (
    *("turn_id", "parent_turn_id", "chain_id", "seq", "step", "dialect", "model"),
    *("messages", "tools", "sampling", "response"),
    *("prompt_delta", "prompt_length", "token_ids", "logprobs", "finish_reason", "outcome", "reason"),
    *("policy_version_first", "policy_version_last", "created_at"),
)
"""Columns of a turn that never change; its role can be corrected."""
_turn_values = operator.itemgetter(*TURN_COLUMNS)
REWARD_COLUMNS = ("turn_id", "step", "name", "source", "written_by", "created_at")
"""Columns of a reward line beside its value, which is stored as a float."""


def turn_digest(row: Mapping[str, Any]) -> bytes:
    return _digest(b"turn", _turn_values(row))


def reward_digest(row: Mapping[str, Any]) -> bytes:
    return _digest(b"reward", [float(row["value"]), *(row[column] for column in REWARD_COLUMNS)])


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
    return hashlib.blake2b(b"".join(pieces), digest_size=SIZE, person=kind).digest()
