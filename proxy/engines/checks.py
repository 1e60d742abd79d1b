"""The checks of an engine before it gets calls: what it was started with, what capture needs, and its chat template.

Nothing is derived from version numbers. The template is found by rendering the same conversations here and there.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Literal, TypeVar

from prometheus_client.parser import text_string_to_metric_families

from proxy.engines.engine import Engine
from proxy.sessions.template import ChatTemplate, Unsafe, load_chat_template
from turnwise.engine_checks import (
    CHAT_ROUTE,
    SERVER_INFO_ROUTE,
    check_capture,
    check_sampling_defaults,
    read_sampling_defaults,
    weights_dtype,
)
from turnwise.errors import EngineRefused, EngineUnsuitable
from turnwise.types import Json

T = TypeVar("T")
log = logging.getLogger(__name__)

LORA_METRIC = "vllm:lora_requests_info"
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


async def check_features(engine: Engine) -> None:
    """Find out what the engine was started with, and check that it meets the requirements of exact capture.

    Raises:
        EngineUnsuitable: naming what is missing and how to get it.
        EngineUnavailable: no answer.
    """
    engine.has_lora = await _has_lora(engine)
    await _check_capture(engine)
    engine.defaults = await find_sampling_defaults(engine)
    engine.info = await _read_server_info(engine)
    engine.dtype = weights_dtype(engine.info)


async def _check_capture(engine: Engine) -> None:
    """Check that the engine meets the requirements of exact capture.

    Raises:
        EngineUnsuitable: naming what is missing and how to get it.
        EngineUnavailable: no answer.
    """
    found = await _answer(engine, check_capture(engine.model), "a plain chat call")
    missing = [each.text for each in found if not each.is_met]
    if missing:
        raise EngineUnsuitable(f"the engine at {engine.url}: {'; '.join(missing)}")


async def find_sampling_defaults(engine: Engine) -> Json:
    """Return the sampling parameters that the engine uses where a request sets none; empty if they are neutral.

    Raises:
        EngineUnsuitable: they are not neutral and not known.
        EngineUnavailable: no answer.
    """
    check = check_sampling_defaults(engine.model, read_sampling_defaults(Path(engine.model_path)))
    defaults, found = await _answer(engine, check, "a call with logit_bias")
    if defaults is None:
        raise EngineUnsuitable(f"the engine at {engine.url}: {found.text}")
    if defaults:
        log.info("the engine at %s has sampling defaults: %s", engine.url, defaults)
    return dict(defaults)


async def _answer(engine: Engine, check: Generator[Json, Json, T], call: str) -> T:
    """Answer the calls of a check by the engine; return what it finds.

    Raises:
        EngineUnsuitable: the engine refuses such a call.
        EngineUnavailable: no answer.
    """
    body = next(check)
    while True:
        try:
            answer = await engine.ask("POST", CHAT_ROUTE, body, seconds=60.0)
            body = check.send(answer)
        except StopIteration as done:
            found: T = done.value
            return found
        except EngineRefused as refused:
            raise EngineUnsuitable(f"the engine at {engine.url} refuses {call}: {refused}") from refused


async def _read_server_info(engine: Engine) -> Json:
    """Return what an engine says of how it was started; nothing if it is not vLLM, or without its development routes.

    Raises:
        EngineUnavailable: no answer.
    """
    with contextlib.suppress(EngineRefused):
        info = await engine.ask("GET", SERVER_INFO_ROUTE, seconds=60.0, config_format="json")
        return info if isinstance(info, dict) else {}
    return {}


async def _has_lora(engine: Engine) -> bool:
    """Return whether an engine was started with LoRA: it has the metric, or the route that loads adapters.

    Either may be missing: an engine can hide its metrics, or be limited to the adapters that it started with.

    Raises:
        EngineUnavailable: no answer.
    """
    try:
        text = str(await engine.ask("GET", "/metrics"))
        if any(family.name == LORA_METRIC for family in text_string_to_metric_families(text)):
            return True
    except (EngineRefused, ValueError):
        log.debug("the engine at %s has no readable metrics", engine.url)
    try:
        await engine.ask("POST", "/v1/load_lora_adapter", {})
    except EngineRefused as refused:
        return refused.status not in (404, 405)  # it answers that the adapter is not named
    return False


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
