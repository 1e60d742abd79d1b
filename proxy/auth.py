"""Who is calling: from the presented key to a principal, and what its role may do.

Three kinds of key: API keys of the store, session keys that the proxy signs itself (so that a million sessions need no
million rows), and, until the store's first API key was made, anything: then the proxy serves loopback only.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import hashlib
import hmac
import time
from collections.abc import Mapping

from turnwise.errors import Forbidden, Unauthorized
from turnwise.store import keys
from turnwise.store.database import Database

SESSION_KEY_PREFIX = "tws-"
CACHE_SECONDS = 5.0
"""How long a verified key is believed without asking the store again; a revoked one works for no longer than that."""
MAC_BYTES = 16
MAY: dict[str, frozenset[str]] = {
    "session": frozenset({"call", "reward", "end"}),
    "agent": frozenset({"call", "reward", "end", "create", "read"}),
    "trainer": frozenset({"reward", "read", "experiences", "policies"}),
    "admin": frozenset({"call", "reward", "end", "create", "read", "experiences", "policies", "activate"}),
}
"""What each role may do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller."""

    tenant: str
    role: str
    key_id: str
    """Names the key in the ledger, and keeps inferred sessions of different keys apart."""
    session_id: str | None = None
    """The one session that a session key is for."""

    def require(self, action: str) -> None:
        """Check that the role may do this.

        Raises:
            Forbidden: otherwise.
        """
        if action not in MAY[self.role]:
            raise Forbidden(
                f"a key of role {self.role!r} may not {action!r}; use one whose role may, see `turnwise keys list`"
            )

    def require_session(self, session_id: str) -> None:
        """Check that a session key is used for its own session.

        Raises:
            Forbidden: otherwise.
        """
        if self.session_id not in (None, session_id):
            raise Forbidden(f"this session key is for session {self.session_id!r}, not {session_id!r}")


class Authenticator:
    """Turns presented keys into principals."""

    def __init__(self, database: Database, secret: bytes) -> None:
        self._database = database
        self._secret = secret
        self._keys_were_made = False
        self._open_until = 0.0
        self._believed: dict[bytes, tuple[float, Principal]] = {}

    async def authenticate(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Return who presents this key.

        Raises:
            Unauthorized: no key, or one that is unknown or revoked.
        """
        presented = presented_key(headers)
        if presented.startswith(SESSION_KEY_PREFIX):
            return self._session_principal(presented)
        digest = hashlib.sha256(presented.encode()).digest()
        if await self._is_open():
            return Principal(tenant="default", role="admin", key_id=f"open-{digest[:6].hex()}")
        believed = self._believed.get(digest)
        if believed is not None and believed[0] > time.monotonic():
            return believed[1]
        return await self._verify(presented, digest)

    async def _is_open(self) -> bool:
        """Say whether no API key was ever made; the first one closes the proxy, and nothing opens it again."""
        if self._keys_were_made:
            return False
        if self._open_until <= time.monotonic():
            self._keys_were_made = await asyncio.to_thread(self._find_keys)
            self._open_until = time.monotonic() + CACHE_SECONDS
        return not self._keys_were_made

    def _find_keys(self) -> bool:
        with self._database.read() as connection:
            return keys.any_keys(connection)

    async def _verify(self, presented: str, digest: bytes) -> Principal:
        def read() -> keys.Key | None:
            with self._database.read() as connection:
                return keys.verify_key(connection, presented)

        key = await asyncio.to_thread(read) if presented else None
        if key is None:
            raise Unauthorized(
                "present an API key as `Authorization: Bearer …`; `turnwise keys create` makes one",
                code="invalid_api_key",
            )
        principal = Principal(tenant=key.tenant, role=key.role, key_id=key.key_id)
        if len(self._believed) > 10_000:
            self._believed.clear()
        self._believed[digest] = (time.monotonic() + CACHE_SECONDS, principal)
        return principal

    def session_key(self, tenant: str, session_id: str) -> str:
        """Return the key for one session; the same one each time."""
        payload = base64.urlsafe_b64encode(f"{tenant}\0{session_id}".encode()).decode().rstrip("=")
        return f"{SESSION_KEY_PREFIX}{payload}.{self._mac(payload)}"

    def _session_principal(self, presented: str) -> Principal:
        payload, _, mac = presented[len(SESSION_KEY_PREFIX) :].partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(payload).encode()):
            raise Unauthorized(
                "this session key was not made by this proxy; create the session again", code="invalid_api_key"
            )
        tenant, _, session_id = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)).decode().partition("\0")
        return Principal(tenant=tenant, role="session", key_id=f"session-{session_id}", session_id=session_id)

    def _mac(self, payload: str) -> str:
        mac = hmac.new(self._secret, payload.encode(), hashlib.sha256).digest()[:MAC_BYTES]
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")


def presented_key(headers: Mapping[bytes, bytes]) -> str:
    """Return the key in `Authorization: Bearer` or, as Anthropic's clients send it, `x-api-key`; empty without one."""
    authorization = headers.get(b"authorization", b"").decode("latin-1")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()
