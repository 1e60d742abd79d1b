"""The address of the proxy, its sessions, and real OpenAI clients for many sessions over shared connections.

The client of a session is a copy of a shared client with another base URL and key. A copy takes microseconds and shares
the connection pool, so ten thousand sessions open few connections. openai is imported at first use; the SDK works
without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import httpx2

from turnwise.client import wire
from turnwise.client.wire import API_KEY_WHEN_NONE, ApiCall
from turnwise.errors import InvalidRequest
from turnwise.types import Json

if TYPE_CHECKING:
    import openai
    from openai import AsyncOpenAI, OpenAI

DEFAULT_BASE_URL = "http://127.0.0.1:8100"
OPENAI_MAX_RETRIES = 8
"""OpenAI's default of 2 is too small if hundreds of agents get 429 from a proxy at the same time."""
STEP_HEADER = "X-Step"
LIMITS = httpx2.Limits(max_connections=1000, max_keepalive_connections=100)


class LoopTransport(httpx2.AsyncBaseTransport):
    """A transport with one connection pool per event loop.

    A connection works only in the event loop that opened it. With a pool for each loop, a client may be created
    anywhere and used in several `asyncio.run`, one after the other or concurrently in threads.
    """

    def __init__(self) -> None:
        self._by_loop: dict[asyncio.AbstractEventLoop, httpx2.AsyncHTTPTransport] = {}

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        loop = asyncio.get_running_loop()
        transport = self._by_loop.get(loop)
        if transport is None:
            transport = httpx2.AsyncHTTPTransport(limits=LIMITS)
            open_loops = {known: kept for known, kept in self._by_loop.items() if not known.is_closed()}
            self._by_loop = {**open_loops, loop: transport}
        return await transport.handle_async_request(request)

    async def aclose(self) -> None:
        transport = self._by_loop.pop(asyncio.get_running_loop(), None)
        if transport is not None:
            await transport.aclose()


class OpenAIPool:
    """Makes OpenAI clients that share their connections."""

    def __init__(self, base_url: str, timeout_seconds: float, transport: LoopTransport | None = None) -> None:
        self._base_url = f"{base_url}/v1"
        self._timeout_seconds = timeout_seconds
        self._transport = transport or LoopTransport()
        self._sync: openai.OpenAI | None = None
        self._async: openai.AsyncOpenAI | None = None

    def sync(self, base_url: str, api_key: str, headers: Mapping[str, str] | None = None) -> openai.OpenAI:
        """Return a client with its own base URL and key; headers are read for every call."""
        if self._sync is None:
            import openai

            self._sync = openai.OpenAI(
                base_url=self._base_url,
                api_key=API_KEY_WHEN_NONE,
                timeout=self._timeout_seconds,
                max_retries=OPENAI_MAX_RETRIES,
            )
        return self._sync.with_options(base_url=base_url, api_key=api_key, set_default_headers=headers)

    def asynchronous(self, base_url: str, api_key: str, headers: Mapping[str, str] | None = None) -> openai.AsyncOpenAI:
        """Return an asynchronous client with its own base URL and key; headers are read for every call."""
        if self._async is None:
            import openai

            self._async = openai.AsyncOpenAI(
                base_url=self._base_url,
                api_key=API_KEY_WHEN_NONE,
                max_retries=OPENAI_MAX_RETRIES,
                timeout=self._timeout_seconds,
                http_client=httpx2.AsyncClient(transport=self._transport, follow_redirects=True),
            )
        return self._async.with_options(base_url=base_url, api_key=api_key, set_default_headers=headers)

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()

    async def aclose(self) -> None:
        """Close the connections of the synchronous clients and those of the running event loop."""
        self.close()
        await self._transport.aclose()


class Connection:
    """Base class of both clients: the proxy's address, the API key, timeouts and retries."""

    def __init__(
        self,
        base_url: str = DEFAULT_BASE_URL,
        api_key: str | None = None,
        *,
        timeout: float = 60.0,
        max_retries: int = 6,
        openai_timeout: float = 600.0,
        transport: LoopTransport | None = None,
    ) -> None:
        """Store the connection's options.

        Args:
            base_url: URL of the proxy, with or without `/v1`.
            api_key: an API key of the proxy; not needed for a proxy without API keys.
            timeout: seconds for each call to the control plane.
            max_retries: number of retries after a broken connection, 429 or 503.
            openai_timeout: seconds for each model call of the sessions' OpenAI clients.
            transport: connections of another client to share; by default the client opens its own.

        Raises:
            InvalidRequest: the API key cannot be sent.
        """
        if not (api_key or "").isascii():
            raise InvalidRequest("an API key has ASCII characters alone; copy it again, whole", param="api_key")
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        self.api_key = api_key or API_KEY_WHEN_NONE
        self.max_retries = max_retries
        self.timeout = timeout
        self.openai_timeout = openai_timeout
        self.model: str | None = None
        self.transport = transport or LoopTransport()
        self.pool = OpenAIPool(self.base_url, openai_timeout, self.transport)
        self.options: dict[str, Any] = {
            "base_url": self.base_url,
            "headers": {"Authorization": f"Bearer {self.api_key}"},
            "timeout": timeout,
        }

    def request_arguments(self, call: ApiCall) -> dict[str, Any]:
        arguments = {"method": call.method, "url": call.path, "params": dict(call.params), "headers": call.headers}
        return arguments if call.body is None else {**arguments, "json": call.body}


def step_header(step: int | None) -> dict[str, str]:
    return {} if step is None else {STEP_HEADER: str(step)}


class SessionState:
    """A session as the proxy described it at its creation."""

    def __init__(self, data: Json, connection: Connection) -> None:
        self.data = data
        self.session_id: str = data["session_id"]
        default_url = f"{connection.base_url}/sessions/{wire.segment(self.session_id)}/v1"
        self.base_url: str = data.get("base_url") or default_url
        self.api_key: str = data.get("api_key") or connection.api_key
        self._pool = connection.pool

    def openai(self, *, step: int | None = None) -> OpenAI:
        """Return a real OpenAI client for this session; with `step`, all its calls belong to that step."""
        return self._pool.sync(self.base_url, self.api_key, step_header(step))

    def openai_async(self, *, step: int | None = None) -> AsyncOpenAI:
        """Return a real asynchronous OpenAI client for this session, over the running loop's shared connections."""
        return self._pool.asynchronous(self.base_url, self.api_key, step_header(step))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(session_id={self.session_id!r}, base_url={self.base_url!r})"
