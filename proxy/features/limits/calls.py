"""How many calls at once, and calls and tokens each minute, a key and a tenant may have; which waiting call is next.

Each proxy process counts for itself, or has a share of the limits of all (`proxy.features.limits.shared`). A session
key counts as the key that made it. A call over a limit waits for `queue_seconds`: keys take turns, so that a key with
many waiting calls delays no other key by more than one call. Without a queue and a limit of keys or tenants, only the
number of all calls is counted, by the calls themselves.
"""

from __future__ import annotations

import asyncio
import collections
import math
import operator
from collections.abc import Awaitable
from typing import NamedTuple, Protocol

from proxy.auth import Principal
from proxy.features.limits.settings import LimitSettings
from proxy.metrics import Metrics
from turnwise.errors import Overloaded
from turnwise.features.limits import Rule

MAX_SCOPES = 10_000
"""Keys and tenants that are remembered; idle ones beyond that are dropped."""


class Bucket:
    """A token bucket that refills within a minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute = per_minute
        self._level = float(per_minute)
        self._updated_at = now

    def blocked_seconds(self, needed: float, now: float) -> float:
        """Return when the level reaches what is needed, in seconds from now; 0 if it does."""
        self._level = min(self._per_minute, self._level + (now - self._updated_at) * self._per_minute / 60)
        self._updated_at = now
        return max(0.0, (needed - self._level) * 60 / self._per_minute)

    def take(self, amount: float) -> None:
        """Take an amount; the level may become negative, and is then refilled first."""
        self._level -= amount

    def set_level(self, level: float, now: float) -> None:
        self._level, self._updated_at = level, now


class Scope:
    """What one key, one tenant or the whole proxy uses now."""

    def __init__(self, name: str, rule: Rule, now: float) -> None:
        self.name = name
        self.num_calls = 0
        self.num_waiting = 0
        self._max_calls = math.inf if rule.max_calls is None else rule.max_calls
        self._requests = None if rule.requests_per_minute is None else Bucket(rule.requests_per_minute, now)
        self._tokens = None if rule.tokens_per_minute is None else Bucket(rule.tokens_per_minute, now)

    def blocked_seconds(self, now: float) -> float:
        """Return how long another call is blocked; infinity until a running one ends."""
        if self.num_calls >= self._max_calls:
            return math.inf
        buckets = ((self._requests, 1.0), (self._tokens, 0.0))
        return max((bucket.blocked_seconds(needed, now) for bucket, needed in buckets if bucket), default=0.0)

    def reached(self, now: float) -> str:
        """Return the limit that blocks another call, as the settings name it after `key_` or `tenant_`."""
        if self.num_calls >= self._max_calls:
            return "max_calls"
        is_blocked = self._requests is not None and self._requests.blocked_seconds(1.0, now) > 0
        return "requests_per_minute" if is_blocked else "tokens_per_minute"

    def is_idle(self, now: float) -> bool:
        """Return whether it would be the same if it were made again."""
        return not self.num_calls and not self.num_waiting and not self.blocked_seconds(now)

    def enter(self) -> None:
        self.num_calls += 1
        if self._requests:
            self._requests.take(1)

    def leave(self, num_tokens: int) -> None:
        self.num_calls -= 1
        if self._tokens:
            self._tokens.take(num_tokens)


class SharesOfAll(Protocol):
    """The limits that this process has a share of."""

    def scope(self, name: str, tenant: str, key_id: str, rule: Rule) -> Scope:
        """Return what one key or tenant, whose key is empty, uses of this process's share."""

    def enlarge(self, scopes: list[Scope]) -> Awaitable[None]:
        """Ask for larger shares for a call that they have no place for, and wait for the answer."""


class Waiter(NamedTuple):
    """A call in the queue."""

    scopes: list[Scope]
    granted: asyncio.Future[None]
    """Done when the call has its place; cancelled when it has given up."""


class Limits:
    """Admits calls."""

    def __init__(self, settings: LimitSettings, max_calls: int, metrics: Metrics) -> None:
        self._key_rule = Rule(settings.key_max_calls, settings.key_requests_per_minute, settings.key_tokens_per_minute)
        self._tenant_rule = Rule(
            settings.tenant_max_calls, settings.tenant_requests_per_minute, settings.tenant_tokens_per_minute
        )
        self._queue_seconds = settings.queue_seconds
        self._metrics = metrics
        self._everybody = Scope("proxy", Rule(max_calls if self._queue_seconds else None), 0.0)
        self.scopes: dict[str, Scope] = {}
        self._queues: collections.OrderedDict[str, collections.deque[Waiter]] = collections.OrderedDict()
        """Waiting calls by key; the first key is served next."""
        self._timer: asyncio.TimerHandle | None = None
        self.have_rules = self._key_rule.is_set or self._tenant_rule.is_set
        self.are_set = self.have_rules or self._queue_seconds > 0
        """Whether calls need `admit`."""
        self.shares: SharesOfAll | None = None

    async def admit(self, principal: Principal) -> list[Scope]:
        """Take a place in all scopes of the caller, after waiting in the queue if there is none; return them.

        The caller gives them to `leave` once.

        Raises:
            Overloaded: no place within `queue_seconds`.
        """
        scopes = self._scopes_of(principal)
        if self.shares is not None and not self._queues and self._blocked_seconds(scopes):
            await self.shares.enlarge(scopes)
        if not self._queues and not self._blocked_seconds(scopes):
            _enter(scopes)
            return scopes
        if self._queue_seconds <= 0:
            raise self._overloaded(scopes)
        await self._wait(principal.root_key_id, scopes)
        return scopes

    def leave(self, scopes: list[Scope], num_tokens: int) -> None:
        """Return the place of a call, and count its prompt and sampled tokens."""
        for scope in scopes:
            scope.leave(num_tokens)
        self.dispatch()

    async def _wait(self, key_id: str, scopes: list[Scope]) -> None:
        waiter = Waiter(scopes, asyncio.get_running_loop().create_future())
        self._queues.setdefault(key_id, collections.deque()).append(waiter)
        self._metrics.queued_calls.inc()
        for scope in scopes:
            scope.num_waiting += 1
        self.dispatch()
        try:
            async with asyncio.timeout(self._queue_seconds):
                await waiter.granted
        except BaseException as error:
            has_given_up = waiter.granted.cancel() or waiter.granted.cancelled()
            self.leave([] if has_given_up else scopes, 0)  # otherwise it was granted at the same time
            if isinstance(error, TimeoutError):
                raise self._overloaded(scopes) from error
            raise
        finally:
            self._metrics.queued_calls.dec()
            for scope in scopes:
                scope.num_waiting -= 1

    def dispatch(self) -> None:
        """Admit waiting calls, one of each key in turn, until none can enter; then set a timer for the next one."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        soonest, admitted = math.inf, True
        while self._queues and admitted:
            soonest, admitted = math.inf, False
            for key_id in list(self._queues):
                queue = self._queues[key_id]
                if not queue[0].granted.cancelled():
                    blocked = self._blocked_seconds(queue[0].scopes)
                    if blocked:
                        soonest = min(soonest, blocked)
                        continue
                    _enter(queue[0].scopes)
                    queue[0].granted.set_result(None)
                    self._queues.move_to_end(key_id)
                queue.popleft()
                admitted = True
                if not queue:
                    del self._queues[key_id]
        if soonest < math.inf:
            self._timer = asyncio.get_running_loop().call_later(soonest, self.dispatch)

    def _blocked_seconds(self, scopes: list[Scope]) -> float:
        now = asyncio.get_running_loop().time()
        return max(scope.blocked_seconds(now) for scope in scopes)

    def _overloaded(self, scopes: list[Scope]) -> Overloaded:
        now = asyncio.get_running_loop().time()
        blocked, full = max(((each.blocked_seconds(now), each) for each in scopes), key=operator.itemgetter(0))
        kind = full.name.partition(" ")[0]
        self._metrics.limited.labels(kind).inc()
        limit = "" if full is self._everybody else f" `{kind}_{full.reached(now)}`"
        seconds = 1 if blocked in (0, math.inf) else math.ceil(blocked)
        waited = f" after {self._queue_seconds:g} s in the queue" if self._queue_seconds else ""
        text = f"the {full.name} is at its limit{limit}{waited}; retry after {seconds} s"
        return Overloaded(text, retry_after_seconds=seconds)

    def _scopes_of(self, principal: Principal) -> list[Scope]:
        scopes = [self._everybody]
        if self._key_rule.is_set:
            name = f"key {principal.root_key_id!r}"
            scopes.append(self._scope(name, principal.tenant, principal.root_key_id, self._key_rule))
        if self._tenant_rule.is_set:
            scopes.append(self._scope(f"tenant {principal.tenant!r}", principal.tenant, "", self._tenant_rule))
        return scopes

    def _scope(self, name: str, tenant: str, key_id: str, rule: Rule) -> Scope:
        scope = self.scopes.get(name)
        if scope is None:
            now = asyncio.get_running_loop().time()
            if len(self.scopes) >= MAX_SCOPES:
                self.scopes = {name: each for name, each in self.scopes.items() if not each.is_idle(now)}
            made = Scope(name, rule, now) if self.shares is None else self.shares.scope(name, tenant, key_id, rule)
            scope = self.scopes[name] = made
        return scope


def _enter(scopes: list[Scope]) -> None:
    for scope in scopes:
        scope.enter()
