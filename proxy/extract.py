"""What the engine tells beyond what the client asked for: decoded for the ledger, cut out of the bytes for the client.

One decision: a reply is never decoded whole and encoded again. Its logprobs alone are ten times as long as the rest, so
a typed pass reads the few fields that capture needs, and what the client did not ask for is replaced by `null` where it
stands; every other byte stays as the engine wrote it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import orjson

from turnwise.types import Json

NULL = b"null"
IDS = ("token_ids", "prompt_token_ids")
ABSENT = msgspec.Raw(NULL)


class EngineChoice(msgspec.Struct):
    """One choice of a reply, or of a chunk of a stream."""

    index: int
    message: Json | None = None
    """Of a whole reply."""
    delta: Json | None = None
    """Of a chunk."""
    finish_reason: str | None = None
    logprobs: msgspec.Raw = ABSENT
    token_ids: msgspec.Raw = ABSENT


class EngineReply(msgspec.Struct):
    """A chat completion, or a chunk of one, as far as capture needs it."""

    choices: list[EngineChoice]
    model: str | None = None
    prompt_token_ids: msgspec.Raw = ABSENT


class _Sampled(msgspec.Struct, gc=False):
    logprob: float | None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Sampled] | None = None


_replies = msgspec.json.Decoder(EngineReply)
_logprobs = msgspec.json.Decoder(_Logprobs | None)
_ids = msgspec.json.Decoder(list[int] | None)


def read_reply(raw: bytes) -> EngineReply:
    """Read a chat completion.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return _replies.decode(raw)


def read_chunks(events: list[bytes]) -> list[EngineReply]:
    """Read chunks of a chat completion, each one line of JSON.

    Raises:
        msgspec.DecodeError: one of them is none.
    """
    return _replies.decode_lines(b"\n".join(events))


def token_ids(value: msgspec.Raw) -> list[int]:
    """Return token ids, none where the engine gave none."""
    return _ids.decode(value) or []


def logprobs(value: msgspec.Raw) -> list[float | None]:
    """Return the logprobs of the sampled tokens, none where the engine gave none."""
    found = _logprobs.decode(value)
    return [sampled.logprob for sampled in found.content or ()] if found is not None else []


def without(raw: bytes, reply: EngineReply, *, keep_logprobs: bool, keep_token_ids: bool) -> bytes:
    """Return `raw`, which `reply` was read from, with `null` for what is not to be kept.

    A key with its quotes is never part of a JSON string, which would have to escape them.
    """
    parts, at = [], 0
    for key, value in _unwanted(reply, keep_logprobs, keep_token_ids):
        begin = raw.find(key, at) + len(key)
        text = bytes(value)
        if begin < len(key) or not raw.startswith(text, begin):
            return _without(decoded(raw), keep_logprobs, keep_token_ids)
        parts.append(raw[at:begin])
        at = begin + len(text)
    parts.append(raw[at:])
    return NULL.join(parts)


def _unwanted(reply: EngineReply, keep_logprobs: bool, keep_token_ids: bool) -> list[tuple[bytes, msgspec.Raw]]:
    """Return keys and values in the order in which vLLM writes them."""
    found = []
    for choice in reply.choices:
        if not keep_logprobs and choice.logprobs is not ABSENT:
            found.append((b'"logprobs":', choice.logprobs))
        if not keep_token_ids and choice.token_ids is not ABSENT:
            found.append((b'"token_ids":', choice.token_ids))
    if not keep_token_ids and reply.prompt_token_ids is not ABSENT:
        found.append((b'"prompt_token_ids":', reply.prompt_token_ids))
    return found


def _without(reply: Json, keep_logprobs: bool, keep_token_ids: bool) -> bytes:
    """Do the same for an engine that writes in another order, or with spaces."""
    for part in (reply, *reply["choices"]):
        for field, is_kept in (("logprobs", keep_logprobs), *((each, keep_token_ids) for each in IDS)):
            if field in part and not is_kept:
                part[field] = None
    return orjson.dumps(reply)


def decoded(raw: bytes) -> Any:
    """Decode JSON whole.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(raw)
