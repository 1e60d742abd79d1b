"""The registry of wire formats. A new format is a module of its own and one entry here."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.dialects.base import Dialect
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.completions import TextCompletions
from proxy.dialects.gemini import Gemini
from proxy.dialects.messages import Messages
from proxy.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), TextCompletions(), Responses(), Messages(), Gemini())
"""All dialects. The first one answers paths that no other claims with `error_prefixes`."""
SESSION_PREFIX = "/sessions/{session_id}"
"""Every route of a dialect is also served under this prefix."""


def dialect_of_path(path: str, headers: Mapping[bytes, bytes]) -> Dialect:
    """Return the dialect whose error shape answers a path that no route serves."""
    if path.startswith("/sessions/"):
        path = "/" + path.removeprefix("/sessions/").partition("/")[2]
    for dialect in DIALECTS:
        if path.startswith(tuple(dialect.error_prefixes)):
            return dialect
    return dialect_of_headers(headers, DIALECTS[0])


def dialect_of_headers(headers: Mapping[bytes, bytes], default: Dialect) -> Dialect:
    """Return the dialect that a header of the client marks, else `default`."""
    return next((each for each in DIALECTS if each.marker_header and each.marker_header in headers), default)
