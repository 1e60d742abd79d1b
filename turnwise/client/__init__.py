"""Sessions and rewards over HTTP: `Client`, `AsyncClient`, and the handles of their sessions."""

from turnwise.client.async_client import AsyncClient, AsyncSessionHandle
from turnwise.client.client import Client, SessionHandle

__all__ = ["AsyncClient", "AsyncSessionHandle", "Client", "SessionHandle"]
