"""Sessions and rewards over HTTP: `Client`, `AsyncClient`, and the handles of their sessions."""

from turnwise.client.client import AsyncClient, AsyncSessionHandle, Client, SessionHandle

__all__ = ["AsyncClient", "AsyncSessionHandle", "Client", "SessionHandle"]
