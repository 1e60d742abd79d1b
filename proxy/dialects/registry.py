"""The registry of wire formats. A new format is a module of its own and one entry here."""

from __future__ import annotations

from proxy.dialects.base import Dialect
from proxy.dialects.chat import ChatCompletions
from proxy.dialects.completions import TextCompletions
from proxy.dialects.messages import Messages
from proxy.dialects.responses import Responses

DIALECTS: tuple[Dialect, ...] = (ChatCompletions(), TextCompletions(), Responses(), Messages())
"""All dialects. The first one answers paths that no other claims with `error_prefixes`."""
SESSION_PREFIX = "/sessions/{session_id}"
"""Every route of a dialect is also served under this prefix."""


def dialect_of_path(path: str) -> Dialect:
    """Return the dialect whose error shape answers a path that no route serves."""
    if path.startswith("/sessions/"):
        path = "/" + path.removeprefix("/sessions/").partition("/")[2]
    for dialect in DIALECTS:
        if path.startswith(dialect.error_prefixes):
            return dialect
    return DIALECTS[0]
