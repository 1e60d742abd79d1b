"""The headers that name a session, which `proxy.sessions.which` and `proxy.workers.affinity` read."""

from __future__ import annotations

OWN = b"x-session-id"
PARENT = b"x-parent-session-id"
"""What opencode sends with the calls of a sub-agent, whose `X-Session-Id` is its own."""
CLAUDE_SESSION = b"x-claude-code-session-id"
CODEX_SESSION = (b"session-id", b"session_id")
THREAD = b"thread-id"
LITELLM_SESSION = b"x-litellm-session-id"
AFFINITY = (b"x-session-affinity", b"x-affinity")
SESSION_HEADERS = (PARENT, OWN, CLAUDE_SESSION, *CODEX_SESSION, THREAD, LITELLM_SESSION, *AFFINITY)
"""All of them; of several in one request, the first of this list counts."""
