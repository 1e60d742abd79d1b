"""How known harnesses and gateways name their sessions and agents: by headers and fields of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from proxy.http.asgi import AFFINITY, CLAUDE_SESSION, CODEX_SESSION, LITELLM_SESSION, THREAD
from proxy.sessions.identities import CLAUDE_USER, UUID, Headers, NativeId, text_of
from turnwise.types import Json


def _header(*names: bytes) -> Callable[[Headers, Json], str | None]:
    return lambda headers, _: next((found for name in names if (found := text_of(headers, name))), None)


def _unique_cache_key(_: Headers, body: Json) -> str | None:
    key = body.get("prompt_cache_key")
    return key if isinstance(key, str) and UUID.search(key) else None


def _claude_user(_: Headers, body: Json) -> object:
    """Return the session in Claude Code's `metadata.user_id`: `user_…_session_<uuid>`, or JSON with `session_id`."""
    metadata = body.get("metadata")
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if not isinstance(user_id, str):
        return None
    if user_id.startswith("{"):
        try:
            decoded: Any = orjson.loads(user_id)
        except orjson.JSONDecodeError:
            return None
        return decoded.get("session_id") if isinstance(decoded, dict) else None
    found = CLAUDE_USER.search(user_id)
    return found[1] if found else None


def _conversation(_: Headers, body: Json) -> object:
    conversation = body.get("conversation")
    return conversation.get("id") if isinstance(conversation, dict) else conversation


def _codex_agent(headers: Headers) -> str | None:
    thread = text_of(headers, THREAD)
    return thread if thread != _header(*CODEX_SESSION)(headers, {}) else None


CLAUDE_AGENT = b"x-claude-code-agent-id"
NATIVE_IDS = (
    NativeId(
        "claude-code",
        _header(CLAUDE_SESSION),
        frozenset({CLAUDE_AGENT}),
        lambda headers: text_of(headers, CLAUDE_AGENT),
    ),
    NativeId("codex", _header(*CODEX_SESSION, THREAD), frozenset({THREAD}), _codex_agent),
    NativeId("litellm", _header(LITELLM_SESSION)),
    NativeId("session-affinity", _header(*AFFINITY)),
    NativeId("claude-user", _claude_user),
    NativeId("conversation", _conversation),
    NativeId("prompt-cache-key", _unique_cache_key),
)
"""In the order in which they are tried."""
