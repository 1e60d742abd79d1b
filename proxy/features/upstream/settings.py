"""Which server gets what no engine serves."""

from __future__ import annotations

from pydantic import SecretStr

from turnwise.settings import Settings


class UpstreamSettings(Settings):
    """The server for what no engine serves."""

    upstream: str | None = None
    """Base URL, such as https://HOST/v1, of a server for embeddings, audio, images and moderations. By default these
    routes are answered with 404."""
    upstream_api_key: SecretStr | None = None
    """Bearer key that the proxy presents to `upstream`."""
