"""Probes a new engine: what capture needs of it, whether it has LoRA, and which chat template it renders with.

Nothing is derived from version numbers. The chat template is found by rendering the same conversations here and there.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

from prometheus_client.parser import text_string_to_metric_families

from proxy.continuation.template import ChatTemplate, Unsafe
from proxy.continuation.template_checks import load_chat_template
from proxy.engines.engine import Engine, Lane
from turnwise import logprob_request
from turnwise.engine_requirements import (
    CHAT_ROUTE,
    SERVER_INFO_ROUTE,
    STRICT_TOOLS_ADVICE,
    check_sampling_defaults,
    enforces_strict_tools,
    read_sampling_defaults,
    weights_dtype,
)
from turnwise.engine_requirements import check_capture as requirements_check
from turnwise.errors import EngineRefused, EngineUnsuitable
from turnwise.types import Json

log = logging.getLogger(__name__)

LORA_METRIC = "vllm:lora_requests_info"
"""Metric of an engine that was started with LoRA."""
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


async def check_capture(engine: Engine) -> None:
    """Check that the engine meets the requirements of exact capture.

    Raises:
        EngineUnsuitable: naming what is missing and how to get it.
        EngineUnavailable: no answer.
    """
    check = requirements_check(engine.model)
    body = next(check)
    try:
        while True:
            body = check.send(await engine.ask("POST", CHAT_ROUTE, body, seconds=60.0))
    except StopIteration as done:
        missing = [found.text for found in done.value if not found.is_met]
    except EngineRefused as refused:
        raise EngineUnsuitable(f"the engine at {engine.url} refuses a plain chat call: {refused}") from refused
    if missing:
        raise EngineUnsuitable(f"the engine at {engine.url}: {'; '.join(missing)}")


async def find_sampling_defaults(engine: Engine) -> Json:
    """Return the sampling parameters that the engine uses where a request sets none; empty if they are neutral.

    Raises:
        EngineUnsuitable: they are not neutral and not known.
        EngineUnavailable: no answer.
    """
    check = check_sampling_defaults(engine.model, read_sampling_defaults(Path(engine.model_path)))
    body = next(check)
    try:
        while True:
            body = check.send(await engine.ask("POST", CHAT_ROUTE, body, seconds=60.0))
    except StopIteration as done:
        defaults, found = done.value
    except EngineRefused as refused:
        raise EngineUnsuitable(f"the engine at {engine.url} refuses a call with logit_bias: {refused}") from refused
    if defaults is None:
        raise EngineUnsuitable(f"the engine at {engine.url}: {found.text}")
    if defaults:
        log.info("the engine at %s has sampling defaults: %s", engine.url, defaults)
    return dict(defaults)


async def read_server_info(engine: Engine) -> None:
    """Note what an engine says of itself: its number format, and whether it enforces the schemas of strict tools.

    Raises:
        EngineUnavailable: no answer.
    """
    try:
        info = await engine.ask("GET", SERVER_INFO_ROUTE, seconds=60.0, config_format="json")
    except EngineRefused:
        return  # not vLLM, or without its development routes
    engine.dtype = weights_dtype(info)
    engine.has_tool_grammar = enforces_strict_tools(info)
    if engine.has_tool_grammar:
        log.warning("the engine at %s: %s", engine.url, STRICT_TOOLS_ADVICE)


async def has_lora(engine: Engine) -> bool:
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
        body: Json = {"model": engine.model, "messages": messages, "add_generation_prompt": True}
        if tools:
            body["tools"] = tools
        try:
            remote = (await engine.ask("POST", "/tokenize", body))["tokens"]
        except EngineRefused:
            remote = None
        try:
            local = template.tokenise(template.render(messages, tools, {}, generate=True))
        except Unsafe:
            local = None
        if local != remote:
            return f"{messages!r:.200}"
    return None


async def token_logprobs(
    lane: Lane, token_ids: list[int], positions: list[int], sampling: Json | None = None
) -> list[float]:
    """Return the logprobs of some of a text's tokens, each given the tokens before it, under a lane's weights.

    Raises:
        EngineRefused: the engine does not support that.
        EngineUnavailable: no answer.
    """
    body = logprob_request.request(lane.adapter or lane.engine.model, token_ids, positions, sampling or {})
    reply = await lane.engine.ask("POST", "/v1/completions", body, seconds=60.0)
    return logprob_request.read(reply, token_ids, positions)
