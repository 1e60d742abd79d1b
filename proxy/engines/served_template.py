"""The chat template that an engine renders with: found by rendering the same conversations here and there."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

from proxy.continuation.template import ChatTemplate, Unsafe
from proxy.continuation.template_checks import load_chat_template
from proxy.engines.engine import Engine
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


async def find_template(engine: Engine, tokenizer: str | None) -> ChatTemplate | None:
    """Return a template that renders as the engine does; None, with a warning, if none was found."""
    path = tokenizer or engine.model_path
    formats: tuple[Literal["string", "openai"], ...] = ("string", "openai")
    for content_format in formats:
        try:
            template = await asyncio.to_thread(load_chat_template, path, content_format)
        except (OSError, ValueError) as error:
            log.warning("no tokenizer at %r (%s): every turn will be tokenised again; set --tokenizer", path, error)
            return None
        difference = await _difference(engine, template)
        if difference is None:
            return template
    log.warning(
        "the chat template of %r renders differently here: %s; every turn will be tokenised again", path, difference
    )
    return None


async def load_unchecked_template(engine: Engine, tokenizer: str | None) -> ChatTemplate | None:
    """Return the template of the tokenizer or of the engine's model, without comparing it with the engine's.

    Without a template it logs a warning: no turn continues another.
    """
    path = tokenizer or engine.model_path
    try:
        template = await asyncio.to_thread(_load_local_template, path, is_named=tokenizer is not None)
    except (OSError, ValueError) as error:
        log.warning(
            "the engine at %s is not checked and has no known chat template (%s): no turn continues another, each turn "
            "with a history is tokenised again; set --tokenizer to the model's directory",
            engine.url,
            error,
        )
        return None
    log.warning("the engine at %s is not checked: the chat template of %r may differ from its own", engine.url, path)
    return template


def _load_local_template(path: str, *, is_named: bool) -> ChatTemplate:
    """Load a template; of a path that nobody has named only a directory, since an id is looked up over the network.

    Raises:
        OSError, ValueError: there is none.
    """
    if not is_named and not Path(path).is_dir():
        raise FileNotFoundError(f"{path!r} is no directory on this machine")
    return load_chat_template(path, "string")


async def _difference(engine: Engine, template: ChatTemplate) -> str | None:
    """Return the first conversation that is rendered differently, None if all are equal."""
    for messages, tools in CONVERSATIONS:
        try:
            remote: list[int] | None = await engine.tokenise(messages, tools)
        except EngineRefused:
            remote = None
        try:
            local = template.tokenise(template.render(messages, tools, {}, generate=True))
        except Unsafe:
            local = None
        if local != remote:
            return f"{messages!r:.200}"
    return None
