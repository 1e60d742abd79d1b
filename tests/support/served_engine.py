"""A proxy in front of the shared real engine, whose weights tests replace."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.control_plane import wait_for_status
from support.engines import RunningEngine, load_own_weights
from support.proxies import RunningProxy, StartProxy


@pytest.fixture
def served(engine: RunningEngine, start_proxy: StartProxy) -> Iterator[RunningProxy]:
    """A proxy, which makes the engine's own model version 0; the engine's weights are restored for other tests.

    No session is held out, so that every call is served by the version that a test has published last.
    """
    proxy = start_proxy(engine.url, "--holdout-share", "0")
    wait_for_status(proxy, 0)
    try:
        yield proxy
    finally:
        if proxy.process.poll() is None:
            proxy.kill()
        load_own_weights(engine)
