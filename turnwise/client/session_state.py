"""A session as the proxy described it, and the OpenAI clients of its URL and key."""

from __future__ import annotations

from typing import TYPE_CHECKING

from turnwise.client import wire
from turnwise.client.connection import Connection, step_header
from turnwise.types import Json

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI


class SessionState:
    """A session as the proxy described it at its creation."""

    def __init__(self, data: Json, connection: Connection) -> None:
        self.data = data
        """The session's JSON."""
        self.session_id: str = data["session_id"]
        default_url = f"{connection.base_url}/sessions/{wire.segment(self.session_id)}/v1"
        self.base_url: str = data.get("base_url") or default_url
        """Base URL for any OpenAI client."""
        self.api_key: str = data.get("api_key") or connection.api_key
        """API key for any OpenAI client."""
        self._pool = connection.pool

    def openai(self, *, step: int | None = None) -> OpenAI:
        """Return a real OpenAI client for this session; with `step`, all its calls belong to that step."""
        return self._pool.sync(self.base_url, self.api_key, step_header(step))

    def openai_async(self, *, step: int | None = None) -> AsyncOpenAI:
        """Return a real asynchronous OpenAI client for this session, over the running loop's shared connections."""
        return self._pool.asynchronous(self.base_url, self.api_key, step_header(step))

    def __repr__(self) -> str:
        return f"{type(self).__name__}(session_id={self.session_id!r}, base_url={self.base_url!r})"
