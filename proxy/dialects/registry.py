"""The wire formats of a process, and which of them answers a request that no route serves."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.dialects.base import Dialect
from proxy.dialects.chat import ChatCompletions

CORE: tuple[Dialect, ...] = (ChatCompletions(),)
"""What a process serves without a feature."""


class Dialects(tuple[Dialect, ...]):
    """All formats of a process. The first one answers paths that no other claims with `error_prefixes`."""

    __slots__ = ()

    def of_path(self, path: str, headers: Mapping[bytes, bytes]) -> Dialect:
        """Return the dialect whose error shape answers a path that no route serves."""
        if path.startswith("/sessions/"):
            path = "/" + path.removeprefix("/sessions/").partition("/")[2]
        claiming = (each for each in self if path.startswith(tuple(each.error_prefixes)))
        return next(claiming, None) or self.of_headers(headers, self[0])

    def of_headers(self, headers: Mapping[bytes, bytes], default: Dialect) -> Dialect:
        return next((each for each in self if each.marker_header and each.marker_header in headers), default)
