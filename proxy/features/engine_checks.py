"""What an engine was started with, and whether it has what exact capture needs, before it gets calls.

Nothing is derived from version numbers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator
from pathlib import Path
from typing import TypeVar

from prometheus_client.parser import text_string_to_metric_families

from proxy.engines.engine import Engine
from proxy.services import Beside, Services
from turnwise.engine_routes import CHAT_ROUTE
from turnwise.errors import EngineRefused, EngineUnsuitable
from turnwise.processes.engine_checks import (
    SERVER_INFO_ROUTE,
    check_capture,
    check_sampling_defaults,
    read_sampling_defaults,
    weights_dtype,
)
from turnwise.types import Json

T = TypeVar("T")
log = logging.getLogger(__name__)

LORA_METRIC = "vllm:lora_requests_info"


class EngineChecks(Beside):
    """Checks each engine before other features ask it anything."""

    def __init__(self, services: Services) -> None:
        self._is_strict = services.settings.engine_check == "strict"
        if services.settings.engine_check != "off":
            services.engine_checks.insert(0, self._check)

    async def _check(self, engine: Engine) -> None:
        """Check an engine's features, and reject it if capture would not be exact.

        Raises:
            EngineUnsuitable: it lacks a required feature, and the check is strict.
        """
        try:
            await check_features(engine)
        except EngineUnsuitable as unsuitable:
            if self._is_strict:
                raise
            log.warning("%s", unsuitable)


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
