"""What the engine tells beyond what the client asked for: cut out of the bytes before the rest of a reply is decoded.

One decision: a reply's logprobs, ten times as long as all the rest, are never decoded on a call's way. They are found
by the text around them, taken out as they stand, and read where they are stored. What the client did not ask for
becomes `null` in its reply; every other byte stays as the engine wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
import orjson

from turnwise.types import Json

IDS = re.compile(rb'token_ids":\s*\[[^]]*\]')
"""Token ids, of a prompt as well, with the end of their key."""
NULL = b"null"


class EngineChoice(msgspec.Struct):
    """One choice of a reply, or of a chunk of a stream."""

    index: int
    message: Json | None = None
    """Of a whole reply."""
    delta: Json | None = None
    """Of a chunk."""
    finish_reason: str | None = None
    logprobs: None = None
    """They have been taken out."""
    token_ids: list[int] | None = None


class EngineReply(msgspec.Struct):
    """A chat completion, or a chunk of one, as far as a call's way needs it."""

    choices: list[EngineChoice]
    model: str | None = None
    prompt_token_ids: list[int] | None = None


class Extracted(NamedTuple):
    """A reply or chunk taken apart."""

    raw: bytes
    rest: bytes
    """The same without logprobs."""
    reply: EngineReply
    """What the rest says."""
    logprobs: list[bytes]
    """JSON of each choice's logprobs, as they are listed in the reply; empty where there are none."""


class _Sampled(msgspec.Struct, gc=False):
    logprob: float | None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Sampled] | None = None
    """On the chat route."""
    token_logprobs: list[float | None] | None = None
    """On the completions route."""


_reply = msgspec.json.Decoder(EngineReply)
_logprobs = msgspec.json.Decoder(list[_Logprobs | None])


def read_reply(raw: bytes, *, has_one_choice: bool) -> Extracted:
    """Take a chat completion, or a chunk of one, apart.

    Args:
        raw: what the engine said.
        has_one_choice: no more than one; several are decoded whole, to tell whose logprobs are whose.

    Raises:
        msgspec.DecodeError: it is no chat completion.
    """
    if has_one_choice:
        try:
            rest, logprobs = _cut_logprobs(raw)
            return Extracted(raw, rest, _reply.decode(rest), logprobs)
        except msgspec.ValidationError:
            pass  # the logprobs are still there, written in another way
    rest, logprobs = _decode_logprobs(raw)
    return Extracted(raw, rest, _reply.decode(rest), logprobs)


def without_ids(replies: bytes) -> bytes:
    """Return replies or chunks, one or many, with `null` for every list of token ids."""
    return IDS.sub(b'token_ids":null', replies)


def read_logprobs(pieces: Iterable[bytes]) -> list[float | None]:
    """Return the logprobs of the sampled tokens; none if what the engine said of them cannot be read."""
    found: list[float | None] = []
    try:
        for told in _logprobs.decode(b"[%b]" % b",".join(pieces)):
            if told is not None:
                found += [sampled.logprob for sampled in told.content or ()] + (told.token_logprobs or [])
    except msgspec.DecodeError:
        return []
    return found


def decoded(raw: bytes) -> Any:
    """Decode JSON whole.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(raw)


def _cut_logprobs(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Return a reply of one choice without its logprobs, and these.

    They stand between two texts, written as vLLM writes them, that no JSON string holds: it would have to escape the
    quotes. Where they stand otherwise they are left in place.
    """
    begin = raw.find(b'"logprobs":{') + len(b'"logprobs":')
    stop = raw.rfind(b'},"finish_reason":') + 1  # from behind, where it is near
    if not len(b'"logprobs":') <= begin < stop:
        return raw, []
    return b"".join((raw[:begin], NULL, raw[stop:])), [raw[begin:stop]]


def _decode_logprobs(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Do the same for any number of choices, however they are written."""
    reply, found = decoded(raw), []
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise msgspec.ValidationError("a completion is an object with a list of choices")
    for choice in choices:
        found.append(orjson.dumps(choice.get("logprobs")))
        if "logprobs" in choice:
            choice["logprobs"] = None
    return orjson.dumps(reply), found
