"""Keys: who a presented key is, session keys that end with their API key, and which role may call which route.

There are two kinds of key: API keys of the store, and session keys that the proxy signs itself, so that sessions do not
need rows for their keys. A session key is a child of the API key that created it, its root: it is valid while the root
is, and shares the root's limits and budget. It is also bound to its session's time of creation, so that it is not
valid for a later session of the same name. Until the store's first API key is created, the proxy accepts any key or
none, and serves loopback only. Such callers are administrators; where `turnwise up` has made a key for its directory,
they may call the model and nothing more, so that no agent rewards itself.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Callable, Mapping

import cachetools

from proxy.settings import ProxySettings
from turnwise.errors import Forbidden, SettingsError, Unauthorized
from turnwise.store import keys, rows
from turnwise.store.database import Connection, Database
from turnwise.types import DEFAULT_POLICY, Session

SESSION_KEY_PREFIX = "tws-"
CACHE_SECONDS = 5.0
"""How long a verified key is accepted without another query. A key that another process creates or revokes takes effect
within this time; a key that this process creates or revokes takes effect immediately."""
MAX_CACHED_KEYS = 10_000
MAC_BYTES = 16
DEFAULT_TENANT = "default"
"""The tenant of keys that were created without one, and of all callers of a proxy without keys."""
OPEN = "open"
"""Root of all callers of a proxy without keys, and of the session keys that it makes."""
SESSION, SESSION_REWARD = "session", "session_reward"
KEYLESS = "keyless"
"""Role of callers without a key beside the key of `turnwise up`."""
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
MAY: dict[str, frozenset[str]] = {
    SESSION: frozenset({"call"}),
    SESSION_REWARD: frozenset({"call", "reward", "end"}),
    "agent": frozenset({"call", "reward", "end", "create", "label", "read", "describe", "metrics"}),
    "trainer": frozenset({"reward", "label", "read", "experiences", "publish", "describe", "metrics"}),
    "admin": frozenset(PHRASES),
}
"""The actions of each role. The first two roles are those of session keys, which are valid for one session."""
ACTION_OF_ROUTE = {
    "POST /v1/sessions": "create",
    "GET /v1/sessions/{session_id}": "read",
    "GET /v1/sessions/{session_id}/turns": "read",
    "POST /v1/sessions/{session_id}/end": "end",
    "GET /v1/turns/{turn_id}": "read",
    "POST /v1/rewards": "reward",
    "GET /v1/keys": "keys",
    "POST /v1/keys": "keys",
    "POST /v1/keys/{key_id}/revoke": "keys",
    "GET /openapi.json": "describe",
    "GET /metrics": "metrics",
}
"""The action of each route of the core's control plane. All model calls are `call`. `/healthz`, `/readyz` and the
dashboard's files need no key."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """The caller."""

    tenant: str
    role: str
    key_id: str
    """Id of the key in the ledger; inferred sessions of different keys are separate."""
    root_key_id: str
    """The key that limits and budgets count the calls of: an API key itself, or the one that made a session key; `OPEN`
    for the callers of a proxy without keys."""
    session_id: str | None = None
    """The session of a session key; None for other keys."""
    session_created_at: int | None = None
    """When that session was created, in microseconds since 1970."""
    has_budget: bool = False
    """Whether the root has a token budget of its own."""
    policy_id: int = DEFAULT_POLICY
    """The policy that new sessions of the key sample with; that of a session key's session is stored with it."""
    train: bool = True
    record: bool = True
    """False where the root is marked: the sessions that it calls in are not trained, or not even recorded."""

    def require(self, action: str) -> None:
        """Check that the role allows the action.

        Raises:
            Forbidden: it does not.
        """
        if self.role == KEYLESS and action != "call":
            raise Unauthorized(
                f"without a key this proxy lets nobody {PHRASES[action]}; send the key that `turnwise up` wrote to "
                "`.turnwise-key` in its directory as `Authorization: Bearer …`",
                code="invalid_api_key",
            )
        if self.role != KEYLESS and action not in MAY[self.role]:
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

    def owns(self, session: Session) -> bool:
        """Return whether a session key was made for this session, not for an earlier one of its name."""
        return session.session_id == self.session_id and rows.to_micros(session.created_at) == self.session_created_at


class Authenticator:
    """Returns the principal of a presented key.

    Args:
        database: It has the keys.
        secret: Signs session keys.
        has_keys: Whether there are keys already: known from the start, it holds also while the database is silent.
        has_local_key: The same of the key of `turnwise up`.
    """

    def __init__(
        self, database: Database, secret: bytes, *, has_keys: bool = False, has_local_key: bool = False
    ) -> None:
        self._database = database
        self._secret = secret
        self._has_keys = has_keys
        self._role_without_key = KEYLESS if has_local_key else "admin"
        self._open_until = 0.0
        self._verified: cachetools.TTLCache[bytes, Principal] = cachetools.TTLCache(MAX_CACHED_KEYS, CACHE_SECONDS)
        self._last_known: cachetools.LRUCache[bytes, Principal] = cachetools.LRUCache(MAX_CACHED_KEYS)
        """The keys that were valid when they were looked up last."""
        self.used_keys: set[str] = set()
        """Ids of keys whose use is to be recorded, which no call waits for."""

    async def authenticate(self, headers: Mapping[bytes, bytes]) -> Principal:
        """Return the principal of the presented key.

        Raises:
            Unauthorized: no key, or one that is unknown, expired or revoked.
        """
        presented = presented_key(headers)
        if presented.startswith(SESSION_KEY_PREFIX):
            return await self._session_principal(presented)
        digest = hashlib.sha256(presented.encode()).digest()
        is_open = await self.is_open()
        if is_open and not presented.startswith(keys.KEY_PREFIX):
            return _principal_without_key(digest, self._role_without_key)
        principal = None
        if presented:
            principal = await self._find_valid(digest, lambda connection: keys.verify_key(connection, presented))
        if principal is None and is_open:
            return _principal_without_key(digest, self._role_without_key)
        if principal is None:
            problem = "the API key is unknown, expired or revoked" if presented else "this proxy needs an API key"
            raise Unauthorized(
                f"{problem}; send one as `Authorization: Bearer …`, `turnwise keys create` makes one",
                code="invalid_api_key",
            )
        return principal

    def last_known(self, headers: Mapping[bytes, bytes]) -> Principal | None:
        """Return the principal of an API key as it was looked up last, for use while the store does not answer."""
        digest = hashlib.sha256(presented_key(headers).encode()).digest()
        known, is_open = self._last_known.get(digest), bool(self._open_until) and not self._has_keys
        return _principal_without_key(digest, self._role_without_key) if known is None and is_open else known

    def forget(self) -> None:
        """Clear the cache of verified keys, after this process has created or revoked a key."""
        self._verified.clear()
        self._last_known.clear()
        self._open_until = 0.0

    async def is_open(self) -> bool:
        """Return whether no API key was ever created; after the first one the proxy always requires a key."""
        if self._has_keys:
            return False
        if self._open_until <= time.monotonic():
            self._has_keys, has_local_key = await self._database.fetch(_kinds)
            self._role_without_key = KEYLESS if has_local_key else "admin"
            self._open_until = time.monotonic() + CACHE_SECONDS
        return not self._has_keys

    async def _find_valid(self, name: bytes, find: Callable[[Connection], keys.Key | None]) -> Principal | None:
        verified = self._verified.get(name)
        if verified is not None:
            return verified
        key = await self._database.fetch(find)
        if key is None:
            self._last_known.pop(name, None)
            return None
        if keys.is_use_unrecorded(key):
            self.used_keys.add(key.key_id)
        principal = self._verified[name] = self._last_known[name] = Principal(
            tenant=key.tenant,
            role=key.role,
            key_id=key.key_id,
            root_key_id=key.key_id,
            has_budget=key.token_budget is not None,
            policy_id=key.policy_id,
            train=key.train,
            record=key.record,
        )
        return principal

    def session_key(
        self, session: Session, creator: Principal, *, may_reward: bool = False, expires_at: int | None = None
    ) -> str:
        """Return a key for one session; the same arguments give the same key.

        Args:
            session: The stored session.
            creator: Whose limits, budget and validity the key shares.
            may_reward: Whether the key may also post rewards for its session and end it.
            expires_at: Time at which the key expires, in seconds since 1970; None if it does not expire.
        """
        role = SESSION_REWARD if may_reward else SESSION
        created_at = str(rows.to_micros(session.created_at))
        lifetime = "" if expires_at is None else str(expires_at)
        parts = [session.tenant, session.session_id, created_at, creator.root_key_id, role, lifetime]
        payload = base64.urlsafe_b64encode("\0".join(parts).encode()).decode().rstrip("=")
        return f"{SESSION_KEY_PREFIX}{payload}.{self._mac(payload)}"

    async def _session_principal(self, presented: str) -> Principal:
        payload, _, mac = presented[len(SESSION_KEY_PREFIX) :].partition(".")
        if not hmac.compare_digest(mac.encode(), self._mac(payload).encode()):
            raise _refused("was not made by this proxy")
        parts = base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)).decode().split("\0")
        tenant, session_id, created_at, root_id, role, expires_at = parts
        if expires_at and time.time() >= int(expires_at):
            raise _refused("has expired")
        root = await self._root(root_id)
        return Principal(
            tenant=tenant,
            role=role,
            key_id=f"session-{tenant}/{session_id}",
            root_key_id=root_id,
            session_id=session_id,
            session_created_at=int(created_at),
            has_budget=root.has_budget,
            train=root.train,
            record=root.record,
        )

    async def _root(self, key_id: str) -> Principal:
        """Return the principal of a session key's root.

        Raises:
            Unauthorized: the root is not valid any more.
        """
        if key_id == OPEN:
            if not await self.is_open():
                raise _refused("was made while the proxy had no API keys")
            return _principal_without_key(b"", self._role_without_key)
        root = await self._find_valid(key_id.encode(), lambda connection: keys.valid_key(connection, key_id))
        if root is None:
            raise _refused("was made with an API key that is expired, revoked or deleted")
        return root

    def _mac(self, payload: str) -> str:
        mac = hmac.new(self._secret, payload.encode(), hashlib.sha256).digest()[:MAC_BYTES]
        return base64.urlsafe_b64encode(mac).decode().rstrip("=")


@functools.lru_cache(MAX_CACHED_KEYS)
def _principal_without_key(digest: bytes, role: str) -> Principal:
    return Principal(tenant=DEFAULT_TENANT, role=role, key_id=f"open-{digest[:6].hex()}", root_key_id=OPEN)


def _kinds(connection: Connection) -> tuple[bool, bool]:
    return keys.any_keys(connection), keys.has_local_key(connection)


def session_deleted(session_id: str) -> Unauthorized:
    return _refused(f"is for session {session_id!r}, which was deleted")


def _refused(why: str) -> Unauthorized:
    return Unauthorized(f"this session key {why}; create the session again", code="invalid_api_key")


def presented_key(headers: Mapping[bytes, bytes]) -> str:
    """Return the key in `Authorization: Bearer` or, as Anthropic's clients send it, `x-api-key`; empty without one."""
    authorization = headers.get(b"authorization", b"").decode("latin-1")
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer" and key:
        return key.strip()
    return headers.get(b"x-api-key", b"").decode("latin-1").strip()


def open_authenticator(database: Database, settings: ProxySettings) -> Authenticator:
    """Read the secret that signs session keys, after checking that a proxy without keys listens on loopback only.

    Raises:
        SettingsError: a proxy without keys would listen on other interfaces than loopback.
    """
    with database.write() as connection:
        secret = keys.server_secret(connection)
        has_keys, has_local_key = _kinds(connection)
    if not has_keys and not _is_loopback(settings.host):
        raise SettingsError(
            f"without API keys the proxy serves loopback only, not {settings.host!r}; "
            "make one with `turnwise keys create`"
        )
    if settings.secret is not None:
        secret = settings.secret.get_secret_value().encode()
    return Authenticator(database, secret, has_keys=has_keys, has_local_key=has_local_key)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
