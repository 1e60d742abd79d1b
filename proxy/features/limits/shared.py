"""Limits of keys and tenants that hold over all proxies on one PostgreSQL: each process holds a share of them.

A call that fits into the share asks nobody. One that does not waits until the store has given the process a larger
share, or is over the limit of all. Shares end by the store's clock, and here so long after they were asked for. What
calls used is reported every `ROUND_SECONDS`. On SQLite each process counts for itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from typing import TYPE_CHECKING

from proxy.features.limits import CallLimits
from proxy.features.limits.calls import Scope
from proxy.services import Beside
from turnwise.errors import StoreError
from turnwise.features.limits import Need, Rule, Share, settle
from turnwise.store.database import Database

if TYPE_CHECKING:
    from proxy.services import Services

log = logging.getLogger(__name__)
LEASE_SECONDS = 10.0
"""How long the places of a process that died stay its own."""
RENEW_SECONDS = 1.0
"""How often a share in use is renewed; half of the requests that it has left are given back then."""
ROUND_SECONDS = 0.2
"""How often tokens are reported, and calls ask again that wait for what other processes have."""
MAX_ROUNDS = 3
"""How often a call asks before it is over the limit: other calls of its process may take what it was given."""


class SharedScope(Scope):
    """This process's share of the limits of one key or tenant."""

    def __init__(self, name: str, tenant: str, key_id: str, rule: Rule, now: float) -> None:
        super().__init__(name, Rule(tokens_per_minute=rule.tokens_per_minute), now)
        self._place, self._rule = (tenant, key_id), rule
        self._most_calls = self._fair_calls = self._num_requests = 0
        self._unreported = 0
        """Tokens."""
        self._is_held = self._is_used = False
        """Whether there is a share, and whether a call came since it was last given."""
        self._ends_at = self._renew_at = self._ask_at = -math.inf
        """When the share ends, when it is renewed, and when the store may have more."""
        self._next_request_at = -math.inf

    def blocked_seconds(self, now: float) -> float:
        if not self._is_held or now >= self._ends_at:
            return math.inf
        if self._rule.max_calls is not None and self.num_calls >= self._most_calls:
            return math.inf
        if self._rule.requests_per_minute is not None and self._num_requests < 1:
            return max(self._next_request_at - now, ROUND_SECONDS)
        return super().blocked_seconds(now)

    def reached(self, now: float) -> str:
        if self._rule.max_calls is not None and self.num_calls >= self._most_calls:
            return "max_calls"
        if self._rule.requests_per_minute is not None and self._num_requests < 1:
            return "requests_per_minute"
        return super().reached(now)

    def is_idle(self, now: float) -> bool:  # noqa: ARG002
        return not (self.num_calls or self.num_waiting or self._is_held or self._unreported)

    def enter(self) -> None:
        super().enter()
        self._num_requests -= self._rule.requests_per_minute is not None
        self._is_used = True

    def leave(self, num_tokens: int) -> None:
        super().leave(num_tokens)
        self._unreported += num_tokens
        # Above its part a place ends with its call: calls that wait here must not keep it from other processes.
        self._most_calls = max(self.num_calls, min(self._most_calls, self._fair_calls))

    def end(self) -> None:
        """Give the whole share back with the next report, if no call runs."""
        self._is_used, self._renew_at = False, -math.inf

    def may_ask(self, now: float) -> bool:
        return now >= self._ask_at

    def need(self, now: float) -> Need | None:
        """Return what to report and to ask for; None if the store knows it."""
        is_due = self._is_held and now >= self._renew_at
        wants = self.num_waiting > 0 and self.may_ask(now)
        if not (is_due or wants or self._unreported):
            return None
        is_idle = is_due and not (self.num_calls or self.num_waiting or self._is_used)
        requests = max(0, self.num_waiting - self._num_requests) if self._rule.requests_per_minute is not None else 0
        if is_due and not requests:
            requests = -self._num_requests if is_idle else -(self._num_requests // 2)
        kept = max(self.num_calls, min(self._most_calls, self._fair_calls) if now < self._ends_at else 0)
        needed = self.num_calls + self.num_waiting
        return Need(*self._place, self._rule, needed, 0 if is_idle else kept, requests, self._unreported, is_idle)

    def reported(self, need: Need) -> None:
        """Give up at once what the store is told to have back: calls that come meanwhile must not use it."""
        self._unreported -= need.num_tokens
        self._num_requests += min(0, need.num_requests)
        self._most_calls = need.num_held
        self._is_used, self._is_held = False, self._is_held and not need.is_idle

    def failed(self, need: Need) -> None:
        """Report the tokens again; what was to be given back stays given up."""
        self._unreported += need.num_tokens

    def take(self, need: Need, share: Share, asked_at: float, now: float) -> None:
        self._is_held = not need.is_idle
        self._most_calls, self._fair_calls = share.num_calls, share.fair_calls
        self._ends_at = asked_at + LEASE_SECONDS
        self._num_requests += share.num_requests
        has_more = share.num_calls > max(self.num_calls, share.fair_calls)
        self._renew_at = now if has_more else now + RENEW_SECONDS
        self._ask_at = now if self.blocked_seconds(now) == 0 else now + ROUND_SECONDS
        if self._rule.requests_per_minute is not None:
            self._next_request_at = now + max(0.0, 1 - share.requests_left) * 60 / self._rule.requests_per_minute
        if self._tokens is not None:
            self._tokens.set_level(share.tokens_left - self._unreported, now)


class SharedLimits(Beside):
    """Reports what this process uses, and asks for its shares."""

    def __init__(self, services: Services) -> None:
        self._limits, self._metrics = services.steps.of(CallLimits).limits, services.metrics
        self._database: Database | None = None
        self._holder = uuid.uuid4().hex
        self._lock = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None
        """The round that takes what calls need from now on; None until one waits for it."""
        if services.database.dialect == "postgresql" and self._limits.have_rules:
            self._limits.shares = self
            # A connection of its own: its transactions are short, and wait for no reads.
            self._database = Database(services.settings.database.get_secret_value(), pool_size=1)
            services.closing.append(self._close)

    def scope(self, name: str, tenant: str, key_id: str, rule: Rule) -> SharedScope:
        return SharedScope(name, tenant, key_id, rule, asyncio.get_running_loop().time())

    async def enlarge(self, scopes: list[Scope]) -> None:
        """Ask for larger shares until a call has a place in all of them, or the store has nothing to give.

        Raises:
            StoreUnavailable: the store does not answer.
        """
        for scope in scopes:
            scope.num_waiting += 1
        try:
            for _ in range(MAX_ROUNDS):
                if not self._may_gain(scopes):
                    return
                await self._ask()
        finally:
            for scope in scopes:
                scope.num_waiting -= 1

    async def run(self) -> None:
        while self._database is not None:
            await asyncio.sleep(ROUND_SECONDS)
            try:
                await self._ask()
            except StoreError as error:
                self._metrics.background_errors.labels("limits").inc()
                log.warning("the limits of all proxies could not be read, and calls use what this one has: %s", error)
            except Exception:  # the task's outermost edge: an unexpected error must not end it
                self._metrics.background_errors.labels("limits").inc()
                log.exception("the limits of all proxies could not be read")

    def _may_gain(self, scopes: list[Scope]) -> bool:
        """Return whether a call has no place for now, and each share that it needs may become larger."""
        now = asyncio.get_running_loop().time()
        blocked = [scope for scope in scopes if scope.blocked_seconds(now)]
        return bool(blocked) and all(isinstance(each, SharedScope) and each.may_ask(now) for each in blocked)

    async def _ask(self) -> None:
        """Wait for the next round; whoever is cancelled meanwhile leaves it whole, so nothing is reported twice."""
        if self._next is None:
            self._next = asyncio.create_task(self._round())
        await asyncio.shield(self._next)

    async def _round(self) -> None:
        async with self._lock:
            self._next = None
            await self._settle(asyncio.get_running_loop().time())
        self._limits.dispatch()

    async def _settle(self, now: float) -> None:
        scopes = [each for each in self._limits.scopes.values() if isinstance(each, SharedScope)]
        needs = [(scope, need) for scope in scopes if (need := scope.need(now)) is not None]
        if not needs:
            return
        for scope, need in needs:
            scope.reported(need)
        try:
            shares = await asyncio.to_thread(self._exchange, [need for _, need in needs])
        except BaseException:
            for scope, need in needs:
                scope.failed(need)
            raise
        answered_at = asyncio.get_running_loop().time()
        for (scope, need), share in zip(needs, shares, strict=True):
            scope.take(need, share, now, answered_at)

    def _exchange(self, needs: list[Need]) -> list[Share]:
        assert self._database is not None
        with self._database.write() as connection:
            return settle(connection, self._holder, LEASE_SECONDS, needs)

    async def _close(self) -> None:
        """Report the last tokens and give the shares back; those of calls that were cut off end with their lease."""
        assert self._database is not None
        for scope in self._limits.scopes.values():
            if isinstance(scope, SharedScope):
                scope.end()
        try:
            await self._round()
        except StoreError as error:
            log.warning("the last tokens of limits could not be reported: %s", error)
        self._database.close()
