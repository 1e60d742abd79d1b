"""What capture needs of a vLLM, and what it was started with.

Nothing is derived from version numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from proxy.engines.engine import Engine
from turnwise.errors import EngineRefused, EngineUnsuitable
from turnwise.types import Json
from turnwise.verify.engine import (
    CHAT_ROUTE,
    SERVER_INFO_ROUTE,
    STRICT_TOOLS_ADVICE,
    check_sampling_defaults,
    enforces_strict_tools,
    read_sampling_defaults,
    weights_dtype,
)
from turnwise.verify.engine import check_capture as requirements_check

T = TypeVar("T")
log = logging.getLogger(__name__)

LORA_METRIC = "vllm:lora_requests_info"
"""Metric of an engine that was started with LoRA."""


async def check_capture(engine: Engine) -> None:
    """Check that the engine meets the requirements of exact capture.

    Raises:
        EngineUnsuitable: naming what is missing and how to get it.
        EngineUnavailable: no answer.
    """
    found = await _answer(engine, requirements_check(engine.model), "a plain chat call")
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


async def read_server_info(engine: Engine) -> tuple[str | None, bool]:
    """Return an engine's number format, and whether it enforces the schemas of strict tools.

    Raises:
        EngineUnavailable: no answer.
    """
    try:
        info = await engine.ask("GET", SERVER_INFO_ROUTE, seconds=60.0, config_format="json")
    except EngineRefused:  # not vLLM, or without its development routes
        return None, True
    has_tool_grammar = enforces_strict_tools(info)
    if has_tool_grammar:
        log.warning("the engine at %s: %s", engine.url, STRICT_TOOLS_ADVICE)
    return weights_dtype(info), has_tool_grammar


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
