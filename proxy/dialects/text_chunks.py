"""Read the chunks of a stream that only extend one text, without decoding each of them.

vLLM sends a chunk for each token. Most chunks of a stream differ only in the text, the token ids and their logprobs. So
the bytes between these are compared with constants, and the texts and ids of all chunks that arrived together are
decoded at once. Every other chunk is read by `proxy.dialects.engine_reply`, with the same result.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from proxy.dialects.sse import PREFIX, SEPARATOR

DELTA = b'"choices":[{"index":0,"delta":{'
FIELDS = {"content": b'"content":"', "reasoning": b'"reasoning":"'}
"""The fields of a delta whose texts are read here, and how the delta begins."""
NOT_IN_HEAD = (SEPARATOR, b'_ids":', b'"logprobs":')
AFTER_TEXT, NO_LOGPROBS = b'"},"logprobs":{', b'"},"logprobs":null'
AFTER_LOGPROBS, NO_FINISH = b'},"finish_reason":null,"token_ids":[', b',"finish_reason":null,"token_ids":'
END = b"]}]}" + SEPARATOR
"""The end of an event, from the end of its ids on."""
NO_IDS = b"null}]}" + SEPARATOR
END_WITH_USAGE = re.compile(rb'\]\}\],"usage":\{[^][\n]*\}\}\n\n')
"""The same of an event that counts the tokens so far."""

_texts = msgspec.json.Decoder(list[str])
_ids = msgspec.json.Decoder(list[int])


class TextChunks(NamedTuple):
    """Consecutive events of one choice that extend one text, and the events around them."""

    before: bytes
    """Earlier events of another form."""
    after: bytes
    """Later events of another form."""
    field: str
    """The message's field that the text belongs to."""
    texts: list[bytes]
    """As JSON strings, without quotes."""
    decoded: str
    """All texts."""
    token_ids: list[int]
    all_logprobs: bytes
    """JSON of all chunks' logprobs, without the outermost braces."""
    logprobs: list[bytes]
    """JSON of each chunk's logprobs, without the outermost braces."""
    ids: list[bytes]
    """The rest of each event, from its token ids on."""
    has_usage: bool
    """Whether each event counts the tokens so far."""

    def shown(self, *, logprobs: bool, token_ids: bool) -> tuple[list[bytes], bytes]:
        """Return what varies between the events for the client, and what follows it in each of them.

        Args:
            logprobs: whether the client asked for them.
            token_ids: whether the client asked for them.
        """
        parts, tail = self.texts, NO_LOGPROBS
        if logprobs:
            parts, tail = list(map(AFTER_TEXT.join, zip(parts, self.logprobs, strict=True))), b"}"
        if token_ids:
            return list(map((tail + NO_FINISH + b"[").join, zip(parts, self.ids, strict=True))), b""
        if not self.has_usage:
            return parts, tail + NO_FINISH + NO_IDS
        rests = [each.partition(b"]")[2] for each in self.ids]
        return list(map((tail + NO_FINISH + b"null").join, zip(parts, rests, strict=True))), b""


def stream_head(events: bytes) -> bytes:
    """Return how the events of a stream begin, up to the delta, as its first event does; empty if it does not.

    The head of a stream has its id, its time and the model, and nothing that is captured.
    """
    end = events.find(DELTA) + len(DELTA)
    head = events[:end] if end >= len(DELTA) else b""
    return head if head.startswith(PREFIX) and not any(other in head for other in NOT_IN_HEAD) else b""


def read_text_chunks(events: bytes, head: bytes, field: str) -> TextChunks | None:
    """Return the events that extend one text; None if there is none, or another event is between them.

    Args:
        events: complete events.
        head: `stream_head` of the stream.
        field: the message's field that the text belongs to.
    """
    opening = head + FIELDS[field]
    before, *parts = events.split(opening)
    if not parts:
        return None
    last, separator, after = parts.pop().partition(SEPARATOR)
    if AFTER_LOGPROBS in last:
        parts.append(last + separator)
    else:  # the finishing chunk
        after = opening + last + separator + after
    texts: list[bytes] = []
    logprobs: list[bytes] = []
    ids: list[bytes] = []
    for part in parts:
        text, _, rest = part.partition(AFTER_TEXT)
        own_logprobs, _, own_ids = rest.rpartition(AFTER_LOGPROBS)  # from the end, which is nearer
        texts.append(text)
        logprobs.append(own_logprobs)
        ids.append(own_ids)
    all_logprobs = b"},{".join(logprobs)
    if not parts or b"\n" in all_logprobs:  # an event without ids is followed by one of another form
        return None
    text_of_ids, has_usage = b",".join(ids), False
    num_ends = text_of_ids.count(END)
    if num_ends:
        text_of_ids = text_of_ids.replace(END, b"")
    else:
        text_of_ids, num_ends = END_WITH_USAGE.subn(b"", text_of_ids)
        has_usage = True
    try:
        decoded, token_ids = _texts.decode(b'["%b"]' % b'","'.join(texts)), _ids.decode(b"[%b]" % text_of_ids)
    except msgspec.DecodeError:
        return None
    if not len(decoded) == num_ends == len(parts):
        return None
    return TextChunks(before, after, field, texts, "".join(decoded), token_ids, all_logprobs, logprobs, ids, has_usage)
