"""Fixtures for third-party clients: a proxy and a fake engine per module, and a check of the store after it."""

from collections.abc import AsyncIterator, Iterator

import httpx2
import openai
import pytest
from support.proxies import ProxyAndEngine, RunningProxy, assert_served_is_stored
from turnwise_fake_engine import RunningFakeEngine


@pytest.fixture
def proxy(shared_proxy: ProxyAndEngine) -> RunningProxy:
    return shared_proxy.proxy


@pytest.fixture
def fake_engine(shared_engine: RunningFakeEngine) -> RunningFakeEngine:
    return shared_engine


@pytest.fixture(scope="module")
async def async_http() -> AsyncIterator[httpx2.AsyncClient]:
    """Connections for asynchronous clients, closed at the end: frameworks never close their own."""
    async with openai.DefaultAsyncHttpxClient() as http:
        yield http


@pytest.fixture(scope="module")
def http() -> Iterator[httpx2.Client]:
    with openai.DefaultHttpxClient() as http:
        yield http


@pytest.fixture(scope="module", autouse=True)
def everything_served_is_stored(shared_proxy: ProxyAndEngine) -> Iterator[None]:
    yield
    assert_served_is_stored(shared_proxy.proxy, shared_proxy.engine)
