"""The support of sampled tokens: the ids that top-k, top-p and min-p left to sample from, as a part of a turn.

Behaviour logprobs are normalised over the support, so a trainer needs it to compute the distribution that sampled. It
is stored as its counts and the differences of its sorted ids, byte plane by byte plane and compressed: about two bytes
an id at a vocabulary of 150,000.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import msgspec
import numpy as np

from turnwise.chains import Experience, is_trainable
from turnwise.engine_plugin.features.supports import FIELD, from_text, tolerance
from turnwise.parts import Part, PartProblem
from turnwise.sampling import SUPPORT
from turnwise.types import TOKEN_BYTES, Json, TokenIds, Turn

Support: TypeAlias = Sequence[TokenIds | None]
"""The sorted ids that could be sampled at each token; None where they are not known."""
SHOWN = (
    "The ids that top-k, top-p and min-p left to sample from at each of `token_ids`, null where they are not known; "
    "null if they cut nothing off, or the engine did not say what. [R]"
)
NAMED_ID = "token_id:"
"""How vLLM begins the name of a token that it names by its id."""
ID_DIGITS = 10
IMPOSSIBLE = -9999.0
"""The logprob in vLLM's JSON of an id that cannot be sampled."""
_UINT32 = np.dtype("<u4")


class Supports(Part):
    """The ids that could be sampled at each of a turn's `token_ids`; none where sampling cut nothing off."""

    name = column = SUPPORT
    fields: ClassVar = {"support": (list[list[int] | None] | None, SHOWN)}
    joined_fields: ClassVar = {
        "support": "The sorted ids that top-k, top-p and min-p left to sample from at each token, None where that is "
        "not known or nothing was cut off; None if it is known of none. [L]"
    }
    json_bytes = 4
    """An id of two bytes has up to six digits and a comma."""

    def pack(self, given: Any, row: Mapping[str, Any]) -> bytes | None:
        try:
            found = read_supports(row["encoded_logprobs"])
        except ValueError as error:
            raise PartProblem("not_read", f"without the ids that could be sampled: {error}") from error
        is_whole = len(found) == len(row["token_ids"]) // TOKEN_BYTES
        return pack(found) if is_whole and any(ids is not None for ids in found) else None

    def join(self, path: Sequence[Turn], trained: Collection[str], loaded: Any) -> Support | None:
        support: list[TokenIds | None] = []
        for turn in path:
            support += [None] * turn.prompt_delta.size
            packed = turn.parts.get(SUPPORT)
            own = unpack(packed) if packed is not None and turn.turn_id in trained else []
            support += own if len(own) == turn.token_ids.size else [None] * turn.token_ids.size
        return support if any(ids is not None for ids in support) else None

    def of_turn(self, packed: bytes | None) -> Json:
        return {"support": None if packed is None else as_json(unpack(packed))}

    def of_experience(self, joined: Support | None, experience: Experience) -> Json:
        return {"support": None if joined is None else as_json(joined[experience.prompt_length :])}

    def problems(self, turn: Turn) -> list[tuple[str, str]]:
        """Return what is wrong with a turn's support: each token's holds the token, and ids that differ."""
        packed = turn.parts.get(SUPPORT)
        if packed is None or not is_trainable(turn):
            return []
        try:
            support = unpack(packed)
        except ValueError as error:
            return [("support", str(error))]
        if len(support) != turn.token_ids.size:
            return [("support", f"of {len(support)} tokens, and {turn.token_ids.size} were sampled")]
        for index, (token, ids) in enumerate(zip(turn.token_ids.tolist(), support, strict=True)):
            if ids is not None and (token not in ids or (np.diff(ids) <= 0).any()):
                named = f"{ids[:5].tolist()} and others"
                return [("support", f"token {token} at {index} is not among the ids that could be sampled, {named}")]
        return []


def support_of(experience: Experience) -> Support | None:
    """Return the ids that could be sampled at each token of a chain; None if they are known of none. [L]."""
    found: Support | None = experience.parts.get(SUPPORT)
    return found


def as_json(support: Support | None) -> list[list[int] | None] | None:
    return None if support is None else [None if ids is None else ids.tolist() for ids in support]


def pack(support: Sequence[Sequence[int] | TokenIds | None]) -> bytes:
    """Return the stored form of the ids that could be sampled at each token."""
    known = [sorted(ids) for ids in support if ids is not None]
    ids = np.fromiter(itertools.chain.from_iterable(known), np.int64)
    sizes = np.fromiter(map(len, known), np.int64, len(known))
    differences = np.diff(ids, prepend=0)
    starts = (np.cumsum(sizes) - sizes)[sizes > 0]
    differences[starts] = ids[starts]
    counts = [0 if ids is None else len(ids) + 1 for ids in support]
    values = np.concatenate([[len(counts)], counts, differences]).astype(_UINT32)
    return zlib.compress(values.view(np.uint8).reshape(-1, _UINT32.itemsize).T.tobytes(), level=1)


def unpack(packed: bytes) -> list[TokenIds | None]:
    """Return the ids that could be sampled at each token, as `pack` got them.

    Raises:
        ValueError: it is not what `pack` has written.
    """
    try:
        planes = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(_UINT32.itemsize, -1)
    except zlib.error as error:
        raise ValueError(f"the stored support cannot be read: {error}") from error
    values = np.ascontiguousarray(planes.T).view(_UINT32).ravel().astype(np.int64)
    length = int(values[0]) if values.size else 0
    counts, differences = values[1 : length + 1], values[length + 1 :]
    ends = np.cumsum(np.maximum(counts - 1, 0))
    if not values.size or counts.size != length or (int(ends[-1]) if length else 0) != differences.size:
        raise ValueError("the stored support cannot be read: it ends early")
    sums = np.concatenate([[0], np.cumsum(differences)])
    found: list[TokenIds | None] = []
    for count, end in zip(counts.tolist(), ends.tolist(), strict=True):
        start = end - count + 1
        found.append((sums[start + 1 : end + 1] - sums[start]).astype(np.int32) if count else None)
    return found


class _Alternative(msgspec.Struct, gc=False):
    token: str
    logprob: float


class _Supported(msgspec.Struct, gc=False):
    support: str | None = msgspec.field(default=None, name=FIELD)
    """As our plug-in of vLLM writes it."""
    top_logprobs: list[_Alternative] = msgspec.field(default_factory=list)


class _Supports(msgspec.Struct, gc=False):
    content: list[_Supported] | None = None
    support: list[str] | None = msgspec.field(default=None, name=FIELD)
    top_logprobs: list[dict[str, float] | None] | None = None


_supports = msgspec.json.Decoder(list[_Supports | None])


def read_supports(encoded: bytes) -> list[TokenIds | None]:
    """Return which ids could be sampled at each token, None where the reply does not say it in a known form.

    Raises:
        ValueError: the JSON has another form.
    """
    found: list[TokenIds | None] = []
    for piece in _supports.decode(b"[%b]" % encoded):
        if piece is None:
            continue
        for token in piece.content or ():
            named = ((each.token, each.logprob) for each in token.top_logprobs)
            found.append(_of_alternatives(named) if token.support is None else from_text(token.support))
        if piece.support is not None:
            found += map(from_text, piece.support)
        else:
            found += [_of_alternatives((named or {}).items()) for named in piece.top_logprobs or ()]
    return found


def _of_alternatives(named: Iterable[tuple[str, float]]) -> TokenIds | None:
    """Return the possible ids among the most likely ones; None if there might be more, or other texts stand there."""
    possible, is_whole = {}, False
    for token, logprob in named:
        number = token.removeprefix(NAMED_ID)
        if number == token or not (number.isascii() and number.isdecimal()) or len(number) > ID_DIGITS or logprob > 1:
            return None
        if logprob > IMPOSSIBLE:
            possible[int(number)] = logprob
        else:
            is_whole = True
    if abs(math.fsum(map(math.exp, possible.values())) - 1) > tolerance(is_whole=is_whole):
        return None
    return np.array(sorted(possible), np.int32) if max(possible, default=0) < 2**31 else None
