"""Which session, agent, step and user a request names, by path, headers, metadata or the ids of known clients.

A session is named by, in this order: the URL's path, `X-Session-Id`, `metadata.session_id`, and the native ids that a
feature knows. A session of a native id is called `<entry>:<id>`, so that ids of different kinds never meet. Each entry
is turned off by its name in the setting `ignored_ids`. With `x-parent-session-id` the session is the parent's, and
`X-Session-Id` names the agent. A name whose session is over continues as `id~2`, `id~3`, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import NamedTuple

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.http.asgi import OWN, PARENT
from turnwise.errors import Conflict, InvalidRequest
from turnwise.types import Json, Session

Headers = Mapping[bytes, bytes]
SESSION_ID = r"^[A-Za-z0-9_:@~-][A-Za-z0-9_.:@~-]{0,255}$"
"""Valid session ids. They are part of URLs and headers, so no character needs escaping, and no id is `..`."""
_SESSION_ID = re.compile(SESSION_ID)
_MAX_NATIVE_ID = 200
_MAX_AGENT = 64
MAX_STEP = 2**31 - 1
MAX_STEP_DIGITS = 10
MAX_KEY_LENGTH = 256
MAX_USER_ID = 1000
"""Bytes of an end user's id that are stored; an index of PostgreSQL takes 2,704."""
UUID = re.compile(r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}")
CLAUDE_USER = re.compile(rf"_session_({UUID.pattern})$")


class NativeId(NamedTuple):
    """One way in which harnesses name their session."""

    name: str
    """In the setting `ignored_ids`, and before the id in the session's id."""
    read: Callable[[Headers, Json], object]
    """Returns the id from headers and body; None, or anything but text, for none."""
    agent_headers: frozenset[bytes] = frozenset()
    """Headers without which no agent is named."""
    agent: Callable[[Headers], str | None] = lambda _: None
    """Returns the id of the agent within the session; None for the main agent."""


def text_of(headers: Headers, name: bytes) -> str | None:
    return headers.get(name, b"").decode("latin-1") or None


OWN_HEADER = OWN.decode()
EXPLICIT_SOURCES = ("path", OWN_HEADER, "metadata")
"""Where a request names a session by the session's own id, in the order in which they are tried."""


def identify(
    call: Call,
    path_id: str | None,
    headers: Headers,
    ignored: Collection[str],
    principal: Principal,
    native_ids: Sequence[NativeId] = (),
) -> None:
    """Set the session, agent, step and key that the request names, and what its caller's key denies.

    A session key's session is its own.

    Args:
        call: the call.
        path_id: the session in the URL's path.
        headers: of the request.
        ignored: names of the entries of `native_ids` that are turned off.
        principal: the caller.
        native_ids: the ways in which harnesses name their sessions, in the order in which they are tried.

    Raises:
        InvalidRequest: an invalid session id or step, or an idempotency key that is too long.
        Forbidden: the caller's key is for another session than the one that the request names.
    """
    metadata = call.body.get("metadata") or {}
    call.agent = headers.get(b"user-agent", b"").decode("latin-1").replace("/", " ").split(" ")[0][:_MAX_AGENT] or None
    name_session(call, path_id, headers, ignored, native_ids)
    if principal.session_id is not None:
        if call.session_id is not None and call.session_source in EXPLICIT_SOURCES:
            principal.require_session(call.session_id)
        call.session_id = principal.session_id
    call.train, call.record = principal.train, principal.record
    if header := headers.get(b"x-step"):
        call.step = _step(header.decode("latin-1"), is_metadata=False)
    elif "step" in metadata:
        call.step = _step(metadata["step"], is_metadata=True)
    if key := headers.get(b"idempotency-key"):
        if len(key) > MAX_KEY_LENGTH:
            raise InvalidRequest(
                f"an Idempotency-Key has at most {MAX_KEY_LENGTH} characters, not {len(key)}", param="Idempotency-Key"
            )
        call.idempotency_key = key.decode("latin-1")


def _step(given: object, *, is_metadata: bool) -> int | None:
    """Return the step that a request names; None for other text in its metadata, which is the application's own."""
    step = given
    if isinstance(given, str) and given.isascii() and given.isdigit() and len(given) <= MAX_STEP_DIGITS:
        step = int(given)
    if isinstance(step, int) and not isinstance(step, bool) and 0 <= step <= MAX_STEP:
        return step
    if given is None or (is_metadata and isinstance(given, str)):
        return None
    raise InvalidRequest(f"a step is a number from 0 to {MAX_STEP}, not {given!r:.80}", param="step")


def name_session(
    call: Call, path_id: str | None, headers: Headers, ignored: Collection[str], native_ids: Sequence[NativeId]
) -> None:
    """Set the session that a call names, where it names it, and its agent; the arguments are those of `identify`.

    Raises:
        InvalidRequest: a session id that is not valid.
    """
    for entry in native_ids:
        if call.agent_id is None and not entry.agent_headers.isdisjoint(headers) and entry.name not in ignored:
            call.agent_id = entry.agent(headers)
    own = None
    if OWN_HEADER not in ignored and (OWN in headers or PARENT in headers):
        own, parent = text_of(headers, OWN), text_of(headers, PARENT)
        if parent is not None:  # a sub-agent names the session of its parent, and itself in the header of its own
            call.agent_id, own = call.agent_id or own, parent
    metadata = call.body.get("metadata") or {}
    in_metadata = _metadata_session(metadata["session_id"]) if "session_id" in metadata else None
    for source, session_id in zip(EXPLICIT_SOURCES, (path_id, own, in_metadata), strict=True):
        if session_id or (source == "path" and session_id is not None):  # `/sessions//v1` is a path without its id
            call.session_id, call.session_source = check_id(session_id), source
            return
    body = {**call.body, **call.original}
    for entry in native_ids:
        native = None if entry.name in ignored else entry.read(headers, body)
        if isinstance(native, str) and native:
            call.session_id, call.session_source = _native_session_id(entry.name, native), entry.name
            return


def _metadata_session(given: object) -> object:
    is_other_text = isinstance(given, str) and given and not _SESSION_ID.fullmatch(given)
    return _native_session_id("metadata", str(given)) if is_other_text else given


def end_user(call: Call) -> str | None:
    """Return the end user of a call: OpenAI's `safety_identifier` or `user`, or `metadata.user_id` of Messages.

    Claude Code's `metadata.user_id` names the session too, and only the part before it is the user.
    """
    body = {**call.body, **call.original}
    metadata = body.get("metadata")
    named = [body.get("safety_identifier"), body.get("user")]
    named.append(metadata.get("user_id") if isinstance(metadata, dict) else None)
    user = next((each for each in named if isinstance(each, str) and each), None)
    if user is None or user.startswith("{"):
        return None
    named_user = CLAUDE_USER.sub("", user).replace("\0", "")  # PostgreSQL's texts have no NUL
    return named_user[:MAX_USER_ID].encode(errors="replace")[:MAX_USER_ID].decode(errors="ignore") or None


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


MAX_NAME = 240
"""Characters of a session id that its continuations keep; a number follows."""


def check_has_policy(session: Session, policy_id: int, name: str, *, param: str) -> None:
    """Check that the policy that a request names is a session's own.

    Raises:
        Conflict: it has another one.
    """
    if session.policy_id != policy_id:
        raise Conflict(
            f"session {session.session_id!r} has another policy of its own than {name!r}, which does not change; name "
            f"{name!r} as the model of the calls that it samples, or create another session",
            param=param,
            code="session_of_another_policy",
        )


def next_prefix(session_id: str) -> str:
    return f"{session_id[:MAX_NAME]}~"


def next_id(session_id: str, number: int) -> str:
    return session_id if number == 1 else f"{next_prefix(session_id)}{number}"
