"""The fake engine's tokenizer and chat template: one token per byte, and a few special tokens.

A token is a byte, so ids and text determine each other, any text can be sampled, and a character outside ASCII takes
several tokens, as with real tokenizers. The same tokenizer and template can be written in the Hugging Face layout, so
that a client with the engine's model directory renders the same prompts.
"""

from __future__ import annotations

import codecs
import functools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jinja2.sandbox

CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Never part of a reply's text."""
MARKUP_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
"""Special tokens that are part of the text, because parsers read them."""
SPECIAL_IDS = {token: 256 + index for index, token in enumerate((*CONTROL_TOKENS, *MARKUP_TOKENS))}
"""Ids below this are the bytes themselves."""
SPECIAL_TEXTS = {token_id: token for token, token_id in SPECIAL_IDS.items()}
VOCABULARY_SIZE = 256 + len(SPECIAL_IDS)
END_OF_TURN = SPECIAL_IDS["<|im_end|>"]

_BOUNDARY = re.compile("(" + "|".join(map(re.escape, SPECIAL_IDS)) + ")")

CHAT_TEMPLATE = """\
{%- set has_system = messages and messages[0].role == 'system' %}
{%- if has_system or tools %}
    {{- '<|im_start|>system\\n' + (messages[0].content if has_system else '') }}
    {%- for tool in tools or [] %}
        {{- '\\n' + (tool | tojson) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'system' and loop.first %}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- if message.reasoning %}
            {{- '<think>\\n' + message.reasoning + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- message.content or '' }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n' if message.content or not loop.first else '' }}
            {{- '<tool_call>\\n{"name": ' + (call.function.name | tojson) + ', "arguments": ' }}
            {{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""ChatML with Hermes tool calls; the rendering of a message does not depend on later messages."""


def encode(text: str) -> list[int]:
    """Return the ids of a text that may contain special tokens."""
    ids: list[int] = []
    for part in _BOUNDARY.split(text):
        ids.extend([SPECIAL_IDS[part]] if part in SPECIAL_IDS else part.encode())
    return ids


def decode(ids: Iterable[int], *, keep_control: bool = True) -> str:
    """Return the text of ids; broken characters become U+FFFD.

    Raises:
        KeyError: an id is outside the vocabulary.
    """
    pieces = bytearray()
    for token_id in ids:
        if token_id < 256:
            pieces.append(token_id)
        elif keep_control or SPECIAL_TEXTS[token_id] not in CONTROL_TOKENS:
            pieces += SPECIAL_TEXTS[token_id].encode()
    return pieces.decode(errors="replace")


def piecewise(ids: Sequence[int], *, keep_control: bool = False) -> list[str]:
    """Return the text that each token adds: the last token of a character adds the character, others add nothing."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    return [
        decoder.decode(bytes([token_id])) if token_id < 256 else decode([token_id], keep_control=keep_control)
        for token_id in ids
    ]


def render(
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] | None,
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    template_arguments: dict[str, Any] | None = None,
) -> str:
    """Render a conversation with the chat template.

    Raises:
        jinja2.TemplateError: the template cannot render these messages.
    """
    return _compiled(template or CHAT_TEMPLATE).render(
        messages=[_normalised(message) for message in messages],
        tools=tools or None,
        add_generation_prompt=add_generation_prompt,
        **(template_arguments or {}),
    )


def text_of(content: Any) -> str:
    """Return the text of a message's content, a string or a list of parts; a media part becomes its name."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part if isinstance(part, str) else part.get("text", f"<{part.get('type')}>") for part in parts]
    return "\n".join(texts)


def has_media(messages: Iterable[dict[str, Any]]) -> bool:
    """Return whether any message contains media."""
    return any(
        isinstance(part, dict) and part.get("type") not in {"text", "refusal"}
        for message in messages
        if isinstance(message.get("content"), list)
        for part in message["content"]
    )


def write_tokenizer(directory: Path) -> Path:
    """Write tokenizer and template in the Hugging Face layout, with a config that names them; return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    added = [
        {"id": token_id, "content": token, "special": token in CONTROL_TOKENS, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for token, token_id in SPECIAL_IDS.items()
    ]
    vocabulary = {character: byte for byte, character in enumerate(_printable())}
    files: dict[str, dict[str, Any]] = {
        "tokenizer.json": {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "clean_up_tokenization_spaces": False,
        },
        "config.json": {"model_type": "qwen3", "vocab_size": VOCABULARY_SIZE, "eos_token_id": END_OF_TURN},
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=1))
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return directory


def _printable() -> list[str]:
    """Return the character that stands for each byte in byte-level vocabularies."""
    kept = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    stands_for = {byte: chr(byte) for byte in kept} | {byte: chr(256 + index) for index, byte in enumerate(moved)}
    return [stands_for[byte] for byte in range(256)]


@functools.lru_cache(maxsize=32)
def _compiled(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    to_json: Callable[..., str] = functools.partial(json.dumps, ensure_ascii=False)
    environment.filters["tojson"] = to_json
    return environment.from_string(template)


def _normalised(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as vLLM passes it to templates: content as text, tool arguments parsed."""
    normal = {**message, "content": text_of(message.get("content"))}
    if "reasoning_content" in message:
        normal.setdefault("reasoning", message["reasoning_content"])
    if message.get("tool_calls"):
        normal["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _parsed(call["function"].get("arguments"))}}
            for call in message["tool_calls"]
        ]
    return normal


def _parsed(arguments: object) -> object:
    """Return a tool call's arguments as vLLM passes them to templates: anything but an object is an empty object."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments or "{}")
    except json.JSONDecodeError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
