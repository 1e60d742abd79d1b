"""What other people's clients need: a proxy and a fake engine per module, and a count at the end of each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import httpx2
import openai
import pytest
from support.proxies import ProxyAndEngine, RunningProxy, assert_served_is_stored

from turnwise.fake_engine import RunningFakeEngine


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    """The module's proxy."""
    return shared_proxy.proxy


@pytest.fixture
def fake_engine(shared_proxy: ProxyAndEngine) -> Iterator[RunningFakeEngine]:
    """The module's fake engine; rules that a test gives it are gone after the test."""
    yield shared_proxy.engine
    shared_proxy.engine.state.script.rules.clear()


@pytest.fixture(scope="module")
async def async_http() -> AsyncIterator[httpx2.AsyncClient]:
    """Connections for asynchronous clients, closed at the end: frameworks keep their own for ever."""
    async with openai.DefaultAsyncHttpxClient() as http:
        yield http


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    """The same for the others."""
    with openai.DefaultHttpxClient() as http:
        yield http


@pytest.fixture(scope="module", autouse=True)
def everything_served_is_stored(shared_proxy: ProxyAndEngine) -> Iterator[None]:
    """After a module: turns in the database are the calls that the engine saw, token for token."""
    yield
    assert_served_is_stored(shared_proxy.proxy, shared_proxy.engine)
