"""Cut the logprobs and token ids out of an engine reply before the rest of it is decoded.

Logprobs are ten times as long as the rest of a reply, so the call's path never decodes them: they are located by the
text around them, cut out as bytes, and decoded by the writer. Fields that the client did not ask for become `null` in
its reply; every other byte stays as the engine wrote it.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from turnwise.types import Json

IDS = re.compile(rb'token_ids":\s*\[[^]]*\]')
"""A list of token ids (sampled or prompt), with the end of its key."""
ROUTING = re.compile(rb'"routed_experts":\s*"[^"]*"')
"""The experts of each token; no JSON string can contain this text, because it escapes quotes."""
PROMPT_IDS = b'"prompt_token_ids":'
LONG_ECHO_BYTES = 128 * 2**10
"""Length of a reply from which the echoed prompt ids may take milliseconds to check."""
CHECKED_BYTES = 2**20
"""Bytes of ids that are checked at once, so that the check takes little memory."""
NULL = b"null"
NO_IDS = msgspec.Raw(NULL)
LOGPROBS, LOGPROBS_END, NO_LOGPROBS = b'"logprobs":{', b'},"finish_reason":', b'"logprobs":null'
"""The text around logprobs as vLLM writes it, and what replaces them."""
BETWEEN_LOGPROBS = b'}]},{"content":[{'
"""The text between the logprobs of two chunks of a stream; it cannot be part of a JSON string."""
_CONTENT = b'{"content"'
"""How logprobs begin; a whole reply has this text once."""
DIGITS = b"0123456789"
COMMA, FIRST_DIGIT = np.uint8(ord(",")), np.uint8(ord("0"))
SPACES = b" \t\r\n"
"""The spaces that JSON allows."""


class EngineChoice(msgspec.Struct):
    """One choice of a whole reply or of a stream's chunk."""

    index: int
    message: Json | None = None
    """Set in a whole reply."""
    delta: Json | None = None
    """Set in a chunk."""
    finish_reason: str | None = None
    logprobs: None = None
    """Always null: they have been cut out."""
    token_ids: list[int] | None = None
    routed_experts: str | None = None
    """An .npy array in base64, in whole replies of an engine that returns them."""


class EngineReply(msgspec.Struct):
    """The fields of a chat completion, or of a chunk, that the relay needs."""

    choices: list[EngineChoice]
    model: str | None = None
    prompt_token_ids: msgspec.Raw = NO_IDS
    """A JSON array, which is not decoded; see `read_ids`."""


class Extracted(NamedTuple):
    """A reply or chunk, split into its parts."""

    raw: bytes
    rest: bytes
    """`raw` without logprobs."""
    short: bytes
    """`rest`, where possible without the prompt's ids, which are most of its bytes."""
    reply: EngineReply
    """`rest`, decoded."""
    logprobs: list[bytes]
    """JSON of each choice's logprobs, in the reply's order; empty without logprobs."""


class ExtractedChunks(NamedTuple):
    """Chunks of a stream of one choice, split into their parts."""

    rest: bytes
    """The chunks without logprobs, separated by line feeds."""
    replies: list[EngineReply]
    """`rest`, decoded."""
    logprobs: list[bytes]
    """JSON of the logprobs of those chunks that have them."""


class LongEcho(NamedTuple):
    """A reply or chunk, and the prompt ids that were cut out of it."""

    rest: bytes
    """With `null` for the ids."""
    ids: bytes
    """Decimal numbers, separated by commas."""
    num_ids: int


class _Sampled(msgspec.Struct, gc=False):
    logprob: float | None


class _Logprobs(msgspec.Struct, gc=False):
    content: list[_Sampled] | None = None
    """On the chat route."""
    token_logprobs: list[float | None] | None = None
    """On the completions route."""


_reply = msgspec.json.Decoder(EngineReply)
_replies = msgspec.json.Decoder(list[EngineReply])
_logprobs = msgspec.json.Decoder(list[_Logprobs | None])
_logprob_of = operator.attrgetter("logprob")


def read_reply(raw: bytes, *, has_one_choice: bool) -> Extracted:
    """Split a chat completion, or a chunk of one.

    Args:
        raw: the engine's bytes.
        has_one_choice: whether it has at most one choice; several choices are decoded completely, to assign logprobs.

    Raises:
        msgspec.DecodeError: it is not a chat completion.
    """
    if has_one_choice:
        try:
            rest, logprobs = _cut_logprobs(raw)
            return Extracted(raw, rest, *_decode_reply(rest), logprobs)
        except msgspec.ValidationError:
            pass  # the logprobs are formatted in another way and were not cut out
    rest, logprobs = _decode_logprobs(raw)
    return Extracted(raw, rest, rest, _reply.decode(rest), logprobs)


def read_chunks(chunks: list[bytes]) -> ExtractedChunks | None:
    """Split chunks of a stream of one choice, all at once; None if they must be split by `read_reply` one by one.

    Logprobs are located as in `_cut_logprobs`. A line feed separates the chunks, because vLLM writes none inside.
    """
    first, *others = b"\n".join(chunks).split(LOGPROBS)
    stops = [other.find(LOGPROBS_END) + 1 for other in others]
    if 0 in stops:
        return None
    logprobs = [b"{" + other[:stop] for other, stop in zip(others, stops, strict=True)]
    rest = NO_LOGPROBS.join([first, *[other[stop:] for other, stop in zip(others, stops, strict=True)]])
    try:
        replies = _replies.decode(b"[%b]" % rest.replace(b"\n", b","))
    except msgspec.DecodeError:
        return None
    return ExtractedChunks(rest, replies, logprobs) if len(replies) == len(chunks) == rest.count(b"\n") + 1 else None


def cut_echo(reply: bytes, sent: Sequence[bytes]) -> tuple[bytes, bool]:
    """Return a reply or chunk with `null` for the prompt ids, if they are those that were sent, and whether they are.

    The bytes are compared; nothing is decoded. The key cannot be part of a JSON string, which escapes quotes.

    Args:
        reply: the engine's bytes.
        sent: the JSON array of the prompt's ids, in pieces.
    """
    begin = end = reply.find(PROMPT_IDS) + len(PROMPT_IDS)
    if begin < len(PROMPT_IDS):
        return reply, False
    for piece in sent:
        if not reply.startswith(piece, end):
            return reply, False
        end += len(piece)
    return b"".join((reply[:begin], NULL, memoryview(reply)[end:])), True


def cut_long_echo(reply: bytes) -> LongEcho | None:
    """Cut the only list of prompt ids out of a reply or chunk; None if there is none, or another form of it.

    A prompt of a million ids has 6 MB of text. NumPy checks and counts it without the interpreter's lock, so this
    function is for a thread.
    """
    begin = reply.find(PROMPT_IDS + b"[") + len(PROMPT_IDS)
    end = reply.find(b"]", begin) + 1
    if not len(PROMPT_IDS) <= begin < end - 2 or reply.find(PROMPT_IDS, end) >= 0:
        return None
    text, num_ids = np.frombuffer(reply, np.uint8, end - begin - 2, begin + 1), 1
    for start in range(0, len(text), CHECKED_BYTES):
        part = text[start : start + CHECKED_BYTES]
        num_commas = int(np.count_nonzero(part == COMMA))
        if num_commas + int(np.count_nonzero(part - FIRST_DIGIT < 10)) < len(part):
            return None
        num_ids += num_commas
    rest = b"".join((reply[:begin], NULL, memoryview(reply)[end:]))
    return LongEcho(rest, reply[begin + 1 : end - 1], num_ids)


def read_ids(array: msgspec.Raw) -> tuple[bytes, int]:
    """Return the ids of a JSON array as decimal numbers, separated by commas, and their number; none for `null`.

    Raises:
        msgspec.ValidationError: it is not an array of token ids.
    """
    text = bytes(array)
    if text == NULL:
        return b"", 0
    separators = text.translate(None, DIGITS)
    num_commas = len(separators) - 2
    if separators != b"[%b]" % (b"," * num_commas):
        text = text.translate(None, SPACES)
        separators = separators.translate(None, SPACES)
        num_commas = len(separators) - 2
        if separators != b"[%b]" % (b"," * num_commas):
            raise msgspec.ValidationError(f"`prompt_token_ids` must be a list of token ids, not {bytes(array)[:80]!r}")
    return text[1:-1], num_commas + 1 if len(text) > len(b"[]") else 0


def without_ids(replies: bytes) -> bytes:
    """Return one or several replies or chunks with `null` for every list of token ids."""
    return IDS.sub(b'token_ids":null', replies)


def without_routing(reply: bytes) -> bytes:
    """Return a reply with `null` for the experts of its tokens, which no client asks for."""
    return ROUTING.sub(b'"routed_experts":null', reply) if b'"routed_experts":"' in reply else reply


def read_logprobs(pieces: Iterable[bytes]) -> list[float | None]:
    """Return the logprobs of the sampled tokens; an empty list if the JSON has another shape."""
    found: list[float | None] = []
    text = b",".join(pieces)
    if text.rfind(_CONTENT) > 0:  # one object is decoded faster than one for each token of a stream
        text = text.replace(BETWEEN_LOGPROBS, b"},{")
    try:
        for piece in _logprobs.decode(b"[%b]" % text):
            if piece is not None:
                found += map(_logprob_of, piece.content or ())
                found += piece.token_logprobs or ()
    except msgspec.DecodeError:
        return []
    return found


def decoded(raw: bytes) -> Any:
    """Decode JSON.

    Raises:
        msgspec.DecodeError: it is not JSON.
    """
    return msgspec.json.decode(raw)


def _decode_reply(rest: bytes) -> tuple[bytes, EngineReply]:
    """Decode a reply without logprobs; the prompt's ids, most of its bytes, are located by the text around them.

    Returns:
        The reply without these ids, if they were located, and what is decoded.
    """
    begin = rest.find(PROMPT_IDS + b"[") + len(PROMPT_IDS)
    end = rest.find(b"]", begin) + 1
    if len(PROMPT_IDS) <= begin < end and rest.find(b"[", begin + 1, end) < 0:
        short = b"".join((rest[:begin], NULL, rest[end:]))
        reply = _reply.decode(short)
        if reply.prompt_token_ids is not NO_IDS:  # otherwise they are those of a choice
            reply.prompt_token_ids = msgspec.Raw(rest[begin:end])
            return short, reply
    return rest, _reply.decode(rest)


def _cut_logprobs(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Return a reply of one choice without its logprobs, and the logprobs.

    They are located by the text before and after them, as vLLM writes it; no JSON string can contain these texts,
    because it escapes quotes. Logprobs in any other format stay in place.
    """
    begin = raw.find(LOGPROBS) + len(LOGPROBS) - 1
    stop = raw.rfind(LOGPROBS_END) + 1  # searched from the end, which is nearer
    if not len(LOGPROBS) <= begin + 1 <= stop:
        return raw, []
    return b"".join((raw[:begin], NULL, raw[stop:])), [raw[begin:stop]]


def _decode_logprobs(raw: bytes) -> tuple[bytes, list[bytes]]:
    """Do the same for any number of choices in any JSON formatting."""
    reply, found = decoded(raw), []
    choices = reply.get("choices") if isinstance(reply, dict) else None
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise msgspec.ValidationError("a completion is an object with a list of choices")
    for choice in choices:
        found.append(orjson.dumps(choice.get("logprobs")))
        if "logprobs" in choice:
            choice["logprobs"] = None
    return orjson.dumps(reply), found
