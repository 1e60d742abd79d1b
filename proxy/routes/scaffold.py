"""Separates the text of messages from what the chat template adds: role markers, tools, the generation prompt.

The stored ids do not say which token came from where. So each text of the turn's messages is searched for in the
decoded prompt, in order and without white space, because templates and tokenizers change white space at the ends of
texts. If a text is not found, as with templates that rewrite it, only special tokens count as scaffold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from turnwise.types import Json

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""Text of a token that holds a part of a character."""
MAX_PARTS = 8
"""Tokens that are tried together: a character has at most four bytes, and a token may end one and begin the next."""
Decode = Callable[[Sequence[int]], str]


def scaffold_flags(
    token_ids: Sequence[int],
    messages: Sequence[Json],
    pieces: Mapping[int, str],
    special: frozenset[str],
    decode: Decode,
) -> list[bool]:
    """Return for each token of a prompt whether the chat template added it.

    Args:
        token_ids: The prompt, or the part of it that a turn added.
        messages: The messages that it was rendered from.
        pieces: Text of each token on its own.
        special: Texts of the special tokens.
        decode: Returns the text of some tokens.
    """
    text, spans = _solid_text(token_ids, pieces, decode)
    found = _find_all([_without_space(each) for message in messages for each in _texts(message)], text)
    if found is None:
        return [pieces[token] in special for token in token_ids]
    flags = [True] * len(token_ids)
    for start, end in found:
        first, behind = spans[start][0], spans[end - 1][1]
        flags[first:behind] = [False] * (behind - first)
    return flags


def _solid_text(
    token_ids: Sequence[int], pieces: Mapping[int, str], decode: Decode
) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of tokens without white space, and the range of tokens that each of its characters is in."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    for start, end, text in spelled(token_ids, pieces, decode):
        parts.append(_without_space(text))
        spans += [(start, end)] * len(parts[-1])
    return "".join(parts), spans


def spelled(token_ids: Sequence[int], pieces: Mapping[int, str], decode: Decode) -> Iterator[tuple[int, int, str]]:
    """Yield start, end and text of each token, or of the fewest tokens that form whole characters together."""
    at = 0
    while at < len(token_ids):
        text, end = pieces[token_ids[at]], at + 1
        if BROKEN in text:
            text, end = _whole_character(token_ids, at, decode) or (text, end)
        yield at, end, text
        at = end


def _whole_character(token_ids: Sequence[int], at: int, decode: Decode) -> tuple[str, int] | None:
    """Return the text of the fewest tokens from here that hold whole characters, and where they end; None without."""
    for behind in range(at + 2, min(at + MAX_PARTS, len(token_ids)) + 1):
        if BROKEN not in (text := decode(token_ids[at:behind])):
            return text, behind
    return None


def _find_all(wanted: Sequence[str], text: str) -> list[tuple[int, int]] | None:
    """Return where each text is found, each behind the one before; None if one is not found."""
    found: list[tuple[int, int]] = []
    behind = 0
    for each in filter(None, wanted):
        start = text.find(each, behind)
        if start < 0:
            return None
        behind = start + len(each)
        found.append((start, behind))
    return found


def _texts(message: Json) -> Iterator[str]:
    """Yield the texts of a message in the order in which templates print them."""
    thinking = message.get("reasoning") or message.get("reasoning_content")
    if isinstance(thinking, str):
        yield thinking
    content: Any = message.get("content")
    if isinstance(content, str):
        yield content
    elif isinstance(content, list):
        yield from (str(part["text"]) for part in content if isinstance(part, dict) and part.get("text"))


def _without_space(text: str) -> str:
    return "".join(text.split())
