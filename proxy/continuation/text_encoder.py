"""Tokenise text with the Rust tokenizer itself.

Hugging Face's `encode` also computes offsets, masks and token types, which takes a third of its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SAMPLE = "\n\n  user: Žofie — 誰? 🙂\t<tool_call>{'a': [1, 20]}</tool_call> \r\n"
"""Text that both must tokenise alike, with the special tokens around it."""


def text_encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function that tokenises text as the tokenizer's `encode` does without special tokens.

    If the tokenizer's class overrides `encode`, that method is called.
    """

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    def encode_fast(text: str) -> list[int]:
        (found,) = backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = found.ids
        return ids

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    if not hasattr(backend, "encode_batch_fast") or not _encodes_in_the_usual_way(type(tokenizer)):
        return encode
    sample = SAMPLE.join(["", *tokenizer.all_special_tokens, ""])
    expected = encode(sample)  # switches off truncation and padding that the tokenizer sets
    return encode_fast if encode_fast(sample) == expected else encode


def _encodes_in_the_usual_way(kind: type) -> bool:
    """Return whether a tokenizer's class overrides none of the methods that lead to the Rust tokenizer."""
    from transformers import PreTrainedTokenizerFast

    methods = ("encode", "_encode_plus")
    return all(getattr(kind, name, None) is getattr(PreTrainedTokenizerFast, name) for name in methods)
