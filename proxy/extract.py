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


class Sampled(msgspec.Struct, gc=False):
    """What is read of a sampled token: vLLM tells its text and its bytes too."""

    logprob: float | None


class Logprobs(msgspec.Struct, gc=False):
    """Of one choice."""

    content: list[Sampled] | None = None


class EngineChoice(msgspec.Struct):
    """One choice of a reply, or of a chunk of a stream."""

    index: int
    message: Json | None = None
    """Of a whole reply."""
    delta: Json | None = None
    """Of a chunk."""
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    token_ids: list[int] | None = None

    def sampled_logprobs(self) -> list[float | None]:
        """Return the logprobs of the sampled tokens, none where the engine gave none."""
        found = self.logprobs
        return [] if found is None or found.content is None else [sampled.logprob for sampled in found.content]


class EngineReply(msgspec.Struct):
    """A chat completion, or a chunk of one, as far as capture needs it."""

    choices: list[EngineChoice]
    model: str | None = None
    prompt_token_ids: list[int] | None = None


_replies = msgspec.json.Decoder(EngineReply)


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


def without(raw: bytes, reply: EngineReply, *, keep_logprobs: bool, keep_token_ids: bool) -> bytes:
    """Return `raw`, which `reply` was read from, with `null` for what is not to be kept.

    The values are found by the text around them, which no JSON string can hold: it would have to escape the quotes.
    """
    left, is_compact = raw, True
    if not keep_logprobs:
        left, num_cut = _cut(left, b'"logprobs":', b"{", b'},"finish_reason":')
        is_compact = num_cut == sum([choice.logprobs is not None for choice in reply.choices])
    if not keep_token_ids:
        left, num_cut = _cut(left, b'"token_ids":', b"[", b"]")
        is_compact = is_compact and num_cut == sum([choice.token_ids is not None for choice in reply.choices])
        left, num_cut = _cut(left, b'"prompt_token_ids":', b"[", b"]")
        is_compact = is_compact and num_cut == (reply.prompt_token_ids is not None)
    return left if is_compact else _without(decoded(raw), keep_logprobs=keep_logprobs, keep_token_ids=keep_token_ids)


def _cut(raw: bytes, key: bytes, opening: bytes, end: bytes) -> tuple[bytes, int]:
    """Put `null` in place of a key's values; return how many there were.

    Args:
        raw: JSON without spaces between its tokens.
        key: what stands before a value.
        opening: what a value begins with.
        end: begins with a value's last byte, goes on with what follows it, and is nowhere within a value.
    """
    parts, at, num_cut = [], 0, 0
    begin = raw.find(key + opening)
    while begin >= 0:
        begin += len(key)
        last = raw.find(end, begin)
        if last < 0:
            break
        parts += [raw[at:begin], NULL]
        at = last + 1
        num_cut += 1
        begin = raw.find(key + opening, at)
    return (b"".join([*parts, raw[at:]]), num_cut) if parts else (raw, 0)


def _without(reply: Json, *, keep_logprobs: bool, keep_token_ids: bool) -> bytes:
    """Do the same for an engine that writes its JSON in another way."""
    unwanted = [] if keep_logprobs else ["logprobs"]
    unwanted += [] if keep_token_ids else ["token_ids", "prompt_token_ids"]
    for part in (reply, *reply["choices"]):
        for field in unwanted:
            if field in part:
                part[field] = None
    return orjson.dumps(reply)


def decoded(raw: bytes) -> Any:
    """Decode JSON whole.

    Raises:
        msgspec.DecodeError: it is none.
    """
    return msgspec.json.decode(raw)
