"""An engine that is to get a version on trial: new calls go to other engines, and running ones are waited for."""

from __future__ import annotations

import asyncio
import math
import time

from proxy.engines.engine import Engine, EngineState
from proxy.engines.pool import EnginePool

DRAIN_SECONDS = 10.0
"""How long an engine waits for its running calls before other whole weights are loaded; longer calls span both."""
CONFIRM_SECONDS = DRAIN_SECONDS + 1.0
"""How long the other workers may take for that."""
DRAIN_POLL_SECONDS = 0.02
"""How often it is checked whether the calls of a draining engine have ended."""


async def drain(engine: Engine) -> None:
    """Send new calls to other engines, and wait for the running ones to end."""
    if not engine.is_serving:
        return
    engine.change(EngineState.DRAINING)
    engine.draining_since = time.monotonic()
    deadline = time.monotonic() + DRAIN_SECONDS
    while engine.num_calls and time.monotonic() < deadline:  # noqa: ASYNC110  once in a trial
        await asyncio.sleep(DRAIN_POLL_SECONDS)


def stop_draining(pool: EnginePool, *, before: float = math.inf) -> None:
    """Send new calls to every serving engine again whose draining began before this monotonic instant."""
    for engine in pool.serving:
        if engine.state is EngineState.DRAINING and engine.draining_since < before:
            engine.change(EngineState.READY)
