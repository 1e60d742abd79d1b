"""Where the proxy finds engines that come and go."""

from __future__ import annotations

from urllib.parse import urlsplit

from pydantic import field_validator

from turnwise.settings import Settings

SCHEMES = ("dns", "file", "dynamo+http", "dynamo+https")


class DiscoverySettings(Settings):
    """Engines that are not listed one by one."""

    engines: str | None = None
    """Where engines are named that join and leave, beside those of `engine`, which has then no default:
    `dns://HOST:PORT` for all addresses of a name, such as a headless service; `file://PATH` for a JSON list of URLs,
    read again when it changes; `dynamo+http://HOST:PORT` for the `system_url` of each of Dynamo's
    `GET /v1/rl/workers`."""

    @field_validator("engines")
    @classmethod
    def _check_source(cls, source: str | None) -> str | None:
        if source is None:
            return None
        parts = urlsplit(source)
        is_named = parts.path if parts.scheme == "file" else parts.hostname
        if parts.scheme not in SCHEMES or not is_named or (parts.scheme == "dns" and not parts.port):
            raise ValueError(
                f"{source!r} names no engines; write dns://HOST:PORT, file:///PATH or dynamo+http://HOST:PORT"
            )
        return source
