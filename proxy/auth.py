"""Authentication and authorisation: from the presented key to a principal, and one table of routes and roles.

There are two kinds of key: API keys of the store, and session keys that the proxy signs itself, so that sessions do not
need rows for their keys. Until the store's first API key is created, the proxy accepts any key or none, and serves
loopback only.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import functools
import hashlib
import hmac
import logging
import time
from collections.abc import Mapping

from turnwise.errors import Forbidden, StoreError, Unauthorized
from turnwise.store import keys
from turnwise.store.database import Database

log = logging.getLogger(__name__)

SESSION_KEY_PREFIX = "tws-"
CACHE_SECONDS = 5.0
"""How long a verified key is accepted without another query. A key that another process creates or revokes takes effect
within this time; a key that this process creates or revokes takes effect immediately."""
MAX_CACHED_KEYS = 10_000
MAC_BYTES = 16
SESSION, SESSION_REWARD = "session", "session_reward"
MAY: dict[str, frozenset[str]] = {
    SESSION: frozenset({"call"}),
    SESSION_REWARD: frozenset({"call", "reward", "end"}),
    "agent": frozenset({"call", "reward", "end", "create", "label", "read", "describe", "metrics"}),
    "trainer": frozenset({"reward", "label", "read", "experiences", "publish", "describe", "metrics"}),
    "admin": frozenset(
        {"call", "reward", "end", "create", "label", "read", "experiences", "publish", "activate", "keys", "delete"}
        | {"describe", "metrics", "examine"}
    ),
}
"""The actions of each role. The first two roles are those of session keys, which are valid for one session."""
PHRASES = {
    "call": "call the model",
    "reward": "post rewards",
    "end": "end sessions",
    "create": "create sessions",
    "label": "label sessions",
    "read": "read sessions, turns, updates and policies",
    "experiences": "read experiences",
    "publish": "publish policy versions",
    "activate": "activate policy versions",
    "keys": "manage keys",
    "delete": "delete sessions and tenants",
    "describe": "read the OpenAPI document",
    "metrics": "read metrics",
    "examine": "examine the installation",
}
"""The description of each action, for error messages."""
ACTION_OF_ROUTE = {
    "POST /v1/sessions": "create",
    "GET /v1/sessions": "read",
    "GET /v1/sessions/{session_id}": "read",
    "GET /v1/sessions/{session_id}/turns": "read",
    "POST /v1/sessions/{session_id}/end": "end",
    "PUT /v1/sessions/{session_id}/labels/{label}": "label",
    "DELETE /v1/sessions/{session_id}/labels/{label}": "label",
    "DELETE /v1/sessions/{session_id}": "delete",
    "DELETE /v1/tenant": "delete",
    "GET /v1/turns/{turn_id}": "read",
    "GET /v1/turns/{turn_id}/tokens": "read",
    "GET /v1/turns/{turn_id}/logprobs": "examine",
    "POST /v1/turns/{turn_id}/role": "reward",
    "POST /v1/turns/{turn_id}/fork": "create",
    "POST /v1/rewards": "reward",
    "GET /v1/experiences": "experiences",
    "GET /v1/policies": "read",
    "POST /v1/policies": "publish",
    "POST /v1/policies/{version}/activate": "activate",
    "GET /v1/counts": "read",
    "GET /v1/events": "read",
    "GET /v1/updates": "read",
    "GET /v1/updates/summaries": "read",
    "GET /v1/doctor": "examine",
    "GET /v1/budget": "read",
    "GET /v1/keys": "keys",
    "POST /v1/keys": "keys",
    "POST /v1/keys/{key_id}/revoke": "keys",
    "GET /openapi.json": "describe",
    "GET /metrics": "metrics",
}
"""The action of each route of the control plane. All model calls are `call`. `/healthz`, `/readyz` and the dashboard's
files need no key."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller."""

    tenant: str
    role: str
    key_id: str
    """Id of the key in the ledger; inferred sessions of different keys are separate."""
    session_id: str | None = None
    """The session of a session key; None for other keys."""
    charged_key_id: str | None = None
    """The API key whose token budget counts the calls; None if only the tenant's does."""
    has_budget: bool = False
    """Whether the charged key has a token budget of its own."""

    def require(self, action: str) -> None:
        """Check that the role allows the action.

        Raises:
            Forbidden: it does not.
        """
        if action not in MAY[self.role]:
            able = [role for role in ("agent", "trainer", "admin") if action in MAY[role]]
            article = "An" if self.role[0] in "aeiou" else "A"
            raise Forbidden(
                f"{article} {self.role.replace('_', ' ')} key cannot {PHRASES[action]}. "
                f"Use {'an' if able[0][0] in 'aeiou' else 'a'} {' or '.join(able)} key."
            )

    def require_session(self, session_id: str) -> None:
        """Check that a session key is used for its own session.

        Raises:
            Forbidden: it is for another session.
        """
        if self.session_id not in (None, session_id):
            raise Forbidden(f"this session key is for session {self.session_id!r}, not {session_id!r}")


class Authenticator:
    """Returns the principal of a presented key."""

    def __init__(self, database: Database, secret: bytes) -> None:
        self._database = database
        self._secret = secret
        self._has_keys = False
        self._open_until = 0.0
        self._verified: dict[bytes, tuple[float, Principal]] = {}

    async def authenticate(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Return the principal of the presented key.

        Raises:
            Unauthorized: no key, or one that is unknown, expired or revoked.
        """
        presented = presented_key(headers)
        if presented.startswith(SESSION_KEY_PREFIX):
            return self._session_principal(presented)
        digest = hashlib.sha256(presented.encode()).digest()
        if await self.is_open():
            return _open_principal(digest)
        verified = self._verified.get(digest)
        if verified is not None and verified[0] > time.monotonic():
            return verified[1]
        return await self._verify(presented, digest)

    def forget(self) -> None:
        """Clear the cache of verified keys, after this process has created or revoked a key."""
        self._verified.clear()
        self._open_until = 0.0

    async def is_open(self) -> bool:
        """Return whether no API key was ever created; after the first one the proxy always requires a key."""
        if self._has_keys:
            return False
        if self._open_until <= time.monotonic():
            self._has_keys = await asyncio.to_thread(self._find_keys)
            self._open_until = time.monotonic() + CACHE_SECONDS
        return not self._has_keys

    def _find_keys(self) -> bool:
        with self._database.read() as connection:
            return keys.any_keys(connection)

    async def _verify(self, presented: str, digest: bytes) -> Principal:
        key = await asyncio.to_thread(self._read_key, presented) if presented else None
        if key is None:
            problem = "the API key is unknown, expired or revoked" if presented else "this proxy needs an API key"
            raise Unauthorized(
                f"{problem}; send one as `Authorization: Bearer …`, `turnwise keys create` makes one",
                code="invalid_api_key",
            )
        principal = Principal(
            tenant=key.tenant,
            role=key.role,
            key_id=key.key_id,
            charged_key_id=key.key_id,
            has_budget=key.token_budget is not None,
        )
        if len(self._verified) > MAX_CACHED_KEYS:
            self._verified.clear()
        self._verified[digest] = (time.monotonic() + CACHE_SECONDS, principal)
        return principal

    def _read_key(self, presented: str) -> keys.Key | None:
        """Return the presented key, and record its use at most once a minute."""
        with self._database.read() as connection:
            key = keys.verify_key(connection, presented)
        if key is not None and keys.is_use_unrecorded(key):
            try:
                with self._database.write() as connection:
                    keys.record_use(connection, key.key_id)
            except StoreError as error:
                log.warning("the last use of key %s could not be recorded: %s", key.key_id, error)
        return key

    def session_key(
        self,
        tenant: str,
        session_id: str,
        *,
        may_reward: bool = False,
        expires_at: int | None = None,
        charged_key_id: str | None = None,
    ) -> str:
        """Return a key for one session; the same arguments give the same key.

        Args:
            tenant: The session's tenant.
            session_id: The session.
            may_reward: Whether the key may also post rewards for its session and end it.
            expires_at: Time at which the key expires, in seconds since 1970; None if it does not expire.
            charged_key_id: The API key whose token budget counts the session's calls; None if no budget is set.
        """
        parts = [tenant, session_id]
        if may_reward or expires_at is not None or charged_key_id is not None:
            parts += [SESSION_REWARD if may_reward else SESSION, "" if expires_at is None else str(expires_at)]
        if charged_key_id is not None:
            parts.append(charged_key_id)
        payload = base64.urlsafe_b64encode("\0".join(parts).encode()).decode().rstrip("=")
        return f"{SESSION_KEY_PREFIX}{payload}.{self._mac(payload)}"

    def _session_principal(self, presented: str) -> Principal:
        payload, _, mac = presented[len(SESSION_KEY_PREFIX) :].partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(payload).encode()):
            raise Unauthorized(
                "this session key was not made by this proxy; create the session again", code="invalid_api_key"
            )
        parts = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)).decode().split("\0")
        tenant, session_id, role, expires_at, charged = (*parts, *("", "", SESSION, "", "")[len(parts) :])[:5]
        if expires_at and time.time() >= int(expires_at):
            raise Unauthorized("this session key has expired; create the session again", code="invalid_api_key")
        return Principal(
            tenant=tenant,
            role=role,
            key_id=f"session-{tenant}/{session_id}",
            session_id=session_id,
            charged_key_id=charged or None,
            has_budget=bool(charged),
        )

    def _mac(self, payload: str) -> str:
        mac = hmac.new(self._secret, payload.encode(), hashlib.sha256).digest()[:MAC_BYTES]
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")


@functools.lru_cache(MAX_CACHED_KEYS)
def _open_principal(digest: bytes) -> Principal:
    """Return the caller of a proxy without keys who presented the key with this digest, or none."""
    return Principal(tenant="default", role="admin", key_id=f"open-{digest[:6].hex()}", charged_key_id="open")


def presented_key(headers: Mapping[bytes, bytes]) -> str:
    """Return the key in `Authorization: Bearer` or, as Anthropic's clients send it, `x-api-key`; empty without one."""
    authorization = headers.get(b"authorization", b"").decode("latin-1")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()
