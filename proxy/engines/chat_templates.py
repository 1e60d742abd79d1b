"""The chat template of an engine: it is found by rendering the same conversations here and there."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

from proxy.engines.engine import Engine
from proxy.sessions.template import ChatTemplate, Unsafe, load_chat_template
from turnwise.errors import EngineRefused
from turnwise.types import Json

log = logging.getLogger(__name__)

TOOL: Json = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "A tool.",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
CALL: Json = {"id": "call_0", "type": "function", "function": {"name": "probe", "arguments": '{"x": "é 1"}'}}
CONVERSATIONS: list[tuple[list[Json], list[Json] | None]] = [
    ([{"role": "user", "content": "Hello."}], None),
    ([{"role": "user", "content": [{"type": "text", "text": "Two"}, {"type": "text", "text": "parts."}]}], None),
    (
        [
            {"role": "user", "content": "Hi."},
            {"role": "assistant", "content": "Yes?"},
            {"role": "user", "content": "Dø ït."},
        ],
        None,
    ),
    (
        [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call_0", "content": '{"y": 2}'},
        ],
        [TOOL],
    ),
]
"""Conversations whose renderings are compared with the engine's."""


async def find_template(engine: Engine, tokenizer: str | None, *, is_checked: bool) -> ChatTemplate | None:
    """Return a template that renders as the engine does; None, with a warning, if none was found.

    Args:
        engine: The engine.
        tokenizer: Directory or id of the tokenizer; None for that of the engine's model.
        is_checked: Whether to compare the renderings. Without that, the template of a directory is taken as it is.
    """
    path = tokenizer or engine.model_path
    loop = asyncio.get_running_loop()

    def ask(request: Json) -> list[int]:
        return asyncio.run_coroutine_threadsafe(engine.tokenise({"model": engine.model, **request}), loop).result()

    formats: tuple[Literal["string", "openai"], ...] = ("string", "openai") if is_checked else ("string",)
    difference = None
    for content_format in formats:
        try:
            if not is_checked and tokenizer is None and not await asyncio.to_thread(Path(path).is_dir):
                raise FileNotFoundError(f"{path!r} is no directory on this machine")  # an id may need the network
            template = await asyncio.to_thread(load_chat_template, path, content_format, ask if is_checked else None)
        except (OSError, ValueError) as error:
            log.warning(
                "the engine at %s has no known chat template (%s): no turn continues another, each turn with a history "
                "is tokenised again; set --tokenizer to the model's directory",
                engine.url,
                error,
            )
            return None
        if not is_checked:
            log.warning("the engine at %s is not checked: the template of %r may differ from its own", engine.url, path)
            return template
        difference = await _difference(engine, template)
        if difference is None:
            return template
    log.warning(
        "the chat template of %r renders differently here: %s; every turn will be tokenised again", path, difference
    )
    return None


async def _difference(engine: Engine, template: ChatTemplate) -> str | None:
    """Return the first conversation that is rendered differently, None if all are equal."""
    for messages, tools in CONVERSATIONS:
        request: Json = {"model": engine.model, "messages": messages, "add_generation_prompt": True}
        try:
            remote: list[int] | None = await engine.tokenise(request | ({"tools": tools} if tools else {}))
        except EngineRefused:
            remote = None
        try:
            text = await asyncio.to_thread(template.render, messages, tools, {}, generate=True)
            local = template.tokenise(text)
        except Unsafe:
            local = None
        if local != remote:
            return f"{messages!r:.200}"
    return None
