"""The engine's JSON of sampled tokens' logprobs, and of the ids that could be sampled; the writer decodes it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable

import msgspec
import numpy as np

from turnwise.engine_plugin.supports import FIELD, from_text, tolerance
from turnwise.types import TokenIds

NAMED_ID = "token_id:"
"""How vLLM begins the name of a token that it names by its id."""
ID_DIGITS = 10
IMPOSSIBLE = -9999.0
"""The logprob in vLLM's JSON of an id that cannot be sampled."""


class _Sampled(msgspec.Struct, gc=False):
    logprob: float | None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Sampled] | None = None
    token_logprobs: list[float | None] | None = None


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


_logprobs = msgspec.json.Decoder(list[_Logprobs | None])
_supports = msgspec.json.Decoder(list[_Supports | None])
_logprob_of = operator.attrgetter("logprob")


def read_logprobs(pieces: Iterable[bytes]) -> list[float | None]:
    """Return the logprobs of the sampled tokens; an empty list if the JSON has another shape."""
    found: list[float | None] = []
    try:
        for piece in _logprobs.decode(b"[%b]" % b",".join(pieces)):
            if piece is not None:
                found += map(_logprob_of, piece.content or ())
                found += piece.token_logprobs or ()
    except msgspec.DecodeError:
        return []
    return found


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
