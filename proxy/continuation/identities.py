"""Which session, and which agent within it, a request names: ids that harnesses send by themselves included.

A session is named by, in this order: the URL's path, `X-Session-Id`, `metadata.session_id`, and the native ids of
`NATIVE_IDS`. A session of a native id is called `<entry>:<id>`, so that ids of different kinds never meet. Each entry
is turned off by its name in the setting `ignored_ids`. With `x-parent-session-id` the session is the parent's, and
`X-Session-Id` names the agent.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import orjson

from proxy.dialects.base import Call
from proxy.http.session_headers import AFFINITY, CLAUDE_SESSION, CODEX_SESSION, LITELLM_SESSION, OWN, PARENT, THREAD
from turnwise.errors import InvalidRequest
from turnwise.types import Json

Headers = Mapping[bytes, bytes]
SESSION_ID = r"^[A-Za-z0-9_:@~-][A-Za-z0-9_.:@~-]{0,255}$"
"""Valid session ids. They are part of URLs and headers, so no character needs escaping, and no id is `..`."""
_SESSION_ID = re.compile(SESSION_ID)
_MAX_NATIVE_ID = 200
_UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
_CLAUDE_SESSION = re.compile(rf"_session_({_UUID.pattern})$")


class NativeId(NamedTuple):
    """One way in which harnesses name their session."""

    name: str
    """In the setting `ignored_ids`, and before the id in the session's id."""
    read: Callable[[Headers, Json], object]
    """Returns the id from headers and body; None, or anything but text, for none."""
    agent: Callable[[Headers], str | None] = lambda _: None
    """Returns the id of the agent within the session; None for the main agent."""


def _header(*names: bytes) -> Callable[[Headers, Json], str | None]:
    return lambda headers, _: next((found for name in names if (found := _text(headers, name))), None)


def _text(headers: Headers, name: bytes) -> str | None:
    return headers.get(name, b"").decode("latin-1") or None


def _unique_cache_key(_: Headers, body: Json) -> str | None:
    """Return `prompt_cache_key` if it contains a UUID: applications also send one key for all their conversations."""
    key = body.get("prompt_cache_key")
    return key if isinstance(key, str) and _UUID.search(key) else None


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
    found = _CLAUDE_SESSION.search(user_id)
    return found[1] if found else None


def _conversation(_: Headers, body: Json) -> object:
    """Return the id of a Responses API conversation."""
    conversation = body.get("conversation")
    return conversation.get("id") if isinstance(conversation, dict) else conversation


def _codex_agent(headers: Headers) -> str | None:
    """Return the thread of a Codex sub-agent; the main thread has the session's own id."""
    thread = _text(headers, THREAD)
    return thread if thread != _header(*CODEX_SESSION)(headers, {}) else None


CLAUDE_AGENT = b"x-claude-code-agent-id"
AGENT_HEADERS = frozenset({CLAUDE_AGENT, THREAD})
"""The headers that can name an agent."""
NATIVE_IDS = (
    NativeId("claude-code", _header(CLAUDE_SESSION), lambda headers: _text(headers, CLAUDE_AGENT)),
    NativeId("codex", _header(*CODEX_SESSION, THREAD), _codex_agent),
    NativeId("litellm", _header(LITELLM_SESSION)),
    NativeId("session-affinity", _header(AFFINITY)),
    NativeId("claude-user", _claude_user),
    NativeId("conversation", _conversation),
    NativeId("prompt-cache-key", _unique_cache_key),
)
"""In the order in which they are tried."""
OWN_HEADER = OWN.decode()


def name_session(call: Call, path_id: str | None, headers: Headers, ignored: Collection[str]) -> None:
    """Set the session that a call names, where it names it, and its agent.

    Args:
        call: the call.
        path_id: the session in the URL's path.
        headers: of the request.
        ignored: names of the entries that are turned off.

    Raises:
        InvalidRequest: a session id that is not valid.
    """
    if not AGENT_HEADERS.isdisjoint(headers):
        agents = (entry.agent(headers) for entry in NATIVE_IDS if entry.name not in ignored)
        call.agent_id = next(filter(None, agents), None)
    metadata = call.body.get("metadata") or {}
    explicit = {
        "path": path_id,
        OWN_HEADER: None if OWN_HEADER in ignored else _own_session(call, headers),
        "metadata": metadata.get("session_id"),
    }
    for source, session_id in explicit.items():
        if session_id:
            call.session_id, call.session_source = check_id(session_id), source
            return
    body = {**call.body, **call.original}
    for entry in NATIVE_IDS:
        native = None if entry.name in ignored else entry.read(headers, body)
        if isinstance(native, str) and native:
            call.session_id, call.session_source = _native_session_id(entry.name, native), entry.name
            return


def _own_session(call: Call, headers: Headers) -> str | None:
    """Return the session of `X-Session-Id`; of a sub-agent the parent's, and set its own id as the agent's."""
    own, parent = _text(headers, OWN), _text(headers, PARENT)
    if parent is None:
        return own
    call.agent_id = call.agent_id or own
    return parent


def _native_session_id(name: str, native: str) -> str:
    """Return the session id of a native id; one that is too long or has special characters is replaced by a digest."""
    session_id = f"{name}:{native}"
    if len(native) <= _MAX_NATIVE_ID and _SESSION_ID.fullmatch(session_id):
        return session_id
    return f"{name}:{blake2b(native.encode(errors='replace'), digest_size=16).hexdigest()}"


def check_id(session_id: object) -> str:
    """Return the id if it is valid.

    Raises:
        InvalidRequest: when it is empty, too long, or contains a character that needs escaping in a URL.
    """
    if not isinstance(session_id, str) or not _SESSION_ID.fullmatch(session_id):
        raise InvalidRequest(
            "a session id has 1 to 256 ASCII letters, digits or any of -_.:@~, and does not start with a dot, "
            f"not {session_id!r:.80}",
            param="session_id",
        )
    return session_id
