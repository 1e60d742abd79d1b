"""The engine's JSON of sampled tokens' logprobs; the writer decodes it."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import msgspec

IMPOSSIBLE = -9999.0
"""What vLLM writes for a logprob of minus infinity: of a token that could not be sampled."""


class _Sampled(msgspec.Struct, gc=False):
    logprob: float | None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Sampled] | None = None
    token_logprobs: list[float | None] | None = None


_logprobs = msgspec.json.Decoder(list[_Logprobs | None])
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
