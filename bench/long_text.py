"""Realistic text for long prompts, a byte-level BPE that is trained on it, and conversations of a given length.

No published vocabulary is on this machine without a download. A BPE of 32,768 entries trained on Python's standard
library compresses code as published ones do, to between 3 and 4 characters a token.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
from long_dialects import encode_body, encode_message
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

Json = dict[str, Any]

VOCABULARY_SIZE = 32_768
TRAINED_BYTES = 8_000_000
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
WORDS = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+")
FAMILY = "qwen3_instruct_2507"
"""The chat template, from TRL's wheel."""
NUM_TOOLS = 12
SYSTEM_CHARACTERS = 12_000


@functools.cache
def source_text(limit: int = 60_000_000) -> str:
    """Return source code of the standard library, always in the same order."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py"))
    texts, size = [], 0
    for path in files:
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        texts.append(path.read_text(errors="replace"))
        size += len(texts[-1])
        if size > limit:
            break
    random.Random(0).shuffle(texts)
    return "".join(texts)


def tokenizer_directory() -> Path:
    """Return a directory with the tokenizer and the chat template; train it on the first call on this machine."""
    directory = Path(tempfile.gettempdir()) / f"turnwise-bench-bpe-{VOCABULARY_SIZE}"
    if not (directory / "tokenizer_config.json").exists():
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=VOCABULARY_SIZE - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        tokenizer.train_from_iterator(source_text()[:TRAINED_BYTES].splitlines(keepends=True), trainer)
        tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP_TOKENS])
        wrapped = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            clean_up_tokenization_spaces=False,
        )
        templates = importlib.util.find_spec("trl").submodule_search_locations[0]  # type: ignore[union-attr,index]
        wrapped.chat_template = (Path(templates) / "chat_templates" / f"{FAMILY}.jinja").read_text()
        wrapped.save_pretrained(directory)
    return directory


def tools() -> list[Json]:
    """Return tool schemas of the size that coding agents send."""
    field = {"type": "string", "description": "What the tool works on, relative to the repository's root. " * 4}
    return [
        {
            "type": "function",
            "function": {
                "name": "shell" if number == 0 else f"tool_{number}",
                "description": "Run a command in the repository and return what it prints. " * 8,
                "parameters": {"type": "object", "properties": {"command": field, "path": field}},
            },
        }
        for number in range(NUM_TOOLS)
    ]


@dataclasses.dataclass
class Shape:
    """What a conversation consists of."""

    name: str
    num_messages: int
    """Messages of the first request."""
    has_tools: bool
    new_characters: int = 2_000
    """Characters of the message that each further turn adds."""


MANY = Shape("many messages with tool calls", 450, has_tools=True)
FEW = Shape("few long messages", 4, has_tools=False)


class Conversation:
    """A growing conversation, encoded as the OpenAI SDK encodes it."""

    def __init__(self, shape: Shape, num_characters: int, seed: int) -> None:
        self._shape = shape
        self._pool = source_text()
        self._at = random.Random(seed).randrange(len(self._pool))
        self._tools = json.dumps(tools(), separators=(",", ":")).encode() if shape.has_tools else b""
        self._number = 0
        self._encoded = [_dump(message) for message in self._opening(num_characters)]
        self._in_dialect: list[bytes] = []
        """The messages after the system message, in the format of the requests so far."""

    def _opening(self, num_characters: int) -> Iterator[Json]:
        yield {"role": "system", "content": self._take(min(SYSTEM_CHARACTERS, num_characters // 4))}
        rest = num_characters - SYSTEM_CHARACTERS
        if not self._shape.has_tools:
            each = rest // (self._shape.num_messages - 1)
            for number in range(self._shape.num_messages - 1):
                yield {"role": "assistant" if number % 2 else "user", "content": self._take(each)}
            return
        yield {"role": "user", "content": self._take(3_000)}
        num_pairs = (self._shape.num_messages - 2) // 2
        each = max(200, rest // num_pairs - 200)
        for number in range(num_pairs):
            arguments = json.dumps({"command": f"sed -n {number},200p lib/module_{number}.py", "path": "."})
            call = {"id": f"old_{number}", "type": "function", "function": {"name": "shell", "arguments": arguments}}
            yield {"role": "assistant", "content": "I read the next file.", "tool_calls": [call]}
            yield {"role": "tool", "tool_call_id": f"old_{number}", "content": self._take(each)}

    def _take(self, number: int) -> str:
        pieces = []
        while number > 0:
            piece = self._pool[self._at : self._at + number]
            self._at = (self._at + len(piece)) % len(self._pool)
            number -= len(piece)
            pieces.append(piece)
        return "".join(pieces)

    def request(self, *, stream: bool, max_tokens: int | None = None) -> bytes:
        """Return the body of the next request."""
        end = (
            b',"model":"long"'
            + (b',"stream":true' if stream else b"")
            + (b',"tools":%b' % self._tools if self._tools else b"")
            + (b',"max_tokens":%d' % max_tokens if max_tokens else b"")
        )
        return b'{"messages":[' + b",".join(self._encoded) + b"]" + end + b"}"

    def request_in(self, dialect: str) -> bytes:
        """Return the body of the next request in a format other than chat, always the same one."""
        first = 1 + len(self._in_dialect)
        self._in_dialect += [encode_message(dialect, encoded) for encoded in self._encoded[first:]]
        system: str = orjson.loads(self._encoded[0])["content"]
        return encode_body(dialect, self._in_dialect, system, tools() if self._tools else [])

    def extend(self, reply: Json) -> None:
        """Add a reply, and a tool's result or a user's message."""
        kept = {field: reply[field] for field in ("role", "content", "tool_calls") if reply.get(field)}
        self._encoded.append(_dump(kept))
        content = self._take(self._shape.new_characters)
        for call in reply.get("tool_calls") or ():
            self._encoded.append(_dump({"role": "tool", "tool_call_id": call["id"], "content": content}))
        if not reply.get("tool_calls"):
            self._encoded.append(_dump({"role": "user", "content": content}))


def _dump(message: Json) -> bytes:
    return orjson.dumps(message)
