"""Token budgets of keys and tenants: prompt and sampled tokens together, for good or for a number of days.

The store holds what was used, so a budget survives restarts and is shared by all proxy processes. A process adds its
own calls at once and reads those of other processes every second. A budget is checked before a call and charged
after it, so the calls that run when it is spent still end. Calls without a budget are counted for their key too, and
written every few seconds; without a key nothing is read, counted or written.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import logging
import math
import time

import cachetools

from proxy.auth import OPEN, Principal
from proxy.features.limits.settings import LimitSettings
from proxy.metrics import Metrics
from proxy.writer.client import Writer
from turnwise.errors import BudgetSpent, StoreError
from turnwise.features.limits import add_usage, day_of, used_by_key
from turnwise.store import keys
from turnwise.store.database import Connection, Database
from turnwise.types import utc_now

log = logging.getLogger(__name__)
READ_SECONDS = 1.0
"""How old the numbers of other processes may be."""
WRITE_SECONDS = 2.0
"""How long the counts of keys without a budget wait for further ones."""
MAX_ACCOUNTS = 10_000
"""Keys and tenants that are remembered; others are read again."""


@dataclasses.dataclass(slots=True)
class Account:
    """What one key, or one tenant, has used of its budget."""

    tenant: str
    key_id: str | None
    """None for the tenant's account."""
    budget: int | None = None
    """None for no budget."""
    num_tokens: int = 0
    read_at: float = -math.inf

    @property
    def name(self) -> str:
        return f"tenant {self.tenant!r}" if self.key_id is None else f"key {self.key_id!r}"

    @property
    def kind(self) -> str:
        return "tenant_budget" if self.key_id is None else "key_budget"


class Budgets:
    """Checks and charges budgets."""

    def __init__(self, settings: LimitSettings, database: Database, writer: Writer, metrics: Metrics) -> None:
        self._key_budget = settings.key_token_budget
        self._tenant_budget = settings.tenant_token_budget
        self.days = settings.token_budget_days
        """Length of a budget's period in UTC days, today included; None for a budget that is never renewed."""
        self._database = database
        self._writer = writer
        self._metrics = metrics
        self._accounts: cachetools.LRUCache[tuple[str, str | None], Account] = cachetools.LRUCache(MAX_ACCOUNTS)
        self._unwritten: dict[tuple[str, str, int], int] = {}
        self._in_write: dict[tuple[str, str, int], int] = {}
        self._writing: asyncio.Task[None] | None = None
        self._at_once = asyncio.Event()
        """Set while a count waits that belongs to a budget, and at the end."""
        self.are_set = self._key_budget is not None or self._tenant_budget is not None
        """Whether every caller's calls are counted; otherwise those of keys with a budget of their own."""

    async def check(self, principal: Principal) -> None:
        """Check that the caller's key and tenant have tokens left.

        Raises:
            BudgetSpent: naming the budget that is spent.
        """
        for account in await self.accounts(principal):
            if account.budget is not None and account.num_tokens >= account.budget:
                self._metrics.limited.labels(account.kind).inc()
                raise self._spent(account)

    async def accounts(self, principal: Principal) -> list[Account]:
        """Return the accounts that the caller's calls are charged to, read from the store if they are too old."""
        accounts = [self._account(principal.tenant, key_id) for key_id in (principal.root_key_id, None)]
        old = [each for each in accounts if time.monotonic() - each.read_at > READ_SECONDS]
        if old:
            await self._database.fetch(self._read, old)
        return accounts

    def since_day(self) -> int | None:
        """Return the first day that budgets count; None for all days."""
        return None if self.days is None else day_of(utc_now()) - self.days + 1

    def charge(self, principal: Principal, num_tokens: int) -> None:
        """Add a call's tokens to its accounts, for the store's next transaction if a budget counts them."""
        is_budget = self.are_set or principal.has_budget
        if not num_tokens or not (is_budget or principal.root_key_id != OPEN):
            return
        if is_budget:
            self._at_once.set()
        for key_id in (principal.root_key_id, None):
            self._account(principal.tenant, key_id).num_tokens += num_tokens
        place = (principal.tenant, principal.root_key_id, day_of(utc_now()))
        self._unwritten[place] = self._unwritten.get(place, 0) + num_tokens
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def close(self) -> None:
        self._at_once.set()
        if self._writing is not None:
            await self._writing
        self._at_once.set()
        await self._write()

    def _account(self, tenant: str, key_id: str | None) -> Account:
        found = self._accounts.get((tenant, key_id))
        if found is None:
            found = self._accounts[tenant, key_id] = Account(tenant, key_id)
        return found

    def _read(self, connection: Connection, accounts: list[Account]) -> None:
        since = self.since_day()
        for account in accounts:
            stored = used_by_key(connection, account.tenant, account.key_id, since_day=since)
            account.num_tokens = sum(stored.values()) + self._unstored(account)
            account.budget = self._tenant_budget
            if account.key_id is not None:
                key = keys.valid_key(connection, account.key_id)
                account.budget = self._key_budget if key is None or key.token_budget is None else key.token_budget
            account.read_at = time.monotonic()

    def _unstored(self, account: Account) -> int:
        """Return the account's tokens that this process has not written yet."""
        return sum(
            num_tokens
            for amounts in (self._unwritten, self._in_write)
            for (tenant, key_id, _), num_tokens in list(amounts.items())
            if tenant == account.tenant and account.key_id in (None, key_id)
        )

    async def _write(self) -> None:
        """Write all amounts; those of a failed write are written with the next one."""
        while self._unwritten:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(WRITE_SECONDS):
                    await self._at_once.wait()
            self._at_once.clear()
            self._in_write, self._unwritten = self._unwritten, {}
            try:
                await self._writer.do(add_usage, self._in_write)
            except StoreError as error:
                self._metrics.background_errors.labels("budgets").inc()
                log.warning("the tokens of budgets could not be stored, will retry with the next call: %s", error)
                for place, num_tokens in self._in_write.items():
                    self._unwritten[place] = self._unwritten.get(place, 0) + num_tokens
                return
            finally:
                self._in_write = {}

    def _spent(self, account: Account) -> BudgetSpent:
        period, seconds = "in all", None
        raised = "set a larger `tenant_token_budget`"
        if account.key_id is not None:
            raised = f"raise it with `turnwise keys budget {account.key_id} TOKENS`"
        advice = f"{raised}, or use another key"
        if self.days is not None:
            now = utc_now()
            midnight = datetime.datetime.combine(now.date() + datetime.timedelta(days=1), datetime.time(), datetime.UTC)
            seconds = math.ceil((midnight - now).total_seconds())
            period = "today (UTC)" if self.days == 1 else f"in the last {self.days} days (UTC)"
            advice = f"wait for 00:00 UTC, when the oldest day stops counting, or {advice}"
        return BudgetSpent(
            f"the token budget of {account.name} is spent: {account.num_tokens} of {account.budget} tokens {period}; "
            f"{advice}",
            retry_after_seconds=seconds,
        )
