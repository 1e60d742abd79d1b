"""The proxy's services, created once per process; the lifespan starts and stops them."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import datetime
import ipaddress
import logging
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

from fastapi import Request

from proxy.auth import Authenticator
from proxy.calls.model_names import ModelNames
from proxy.calls.relay import Relay
from proxy.calls.retries import Retries
from proxy.engines.activity import ActivityRecorder
from proxy.engines.checks import check_features, find_template
from proxy.engines.engine import CONNECT_SECONDS, Engine
from proxy.engines.http_client import Access, HttpClient
from proxy.engines.pool import EnginePool
from proxy.events import Events
from proxy.fault import FaultPoints
from proxy.http.freed_memory import keep_freed_memory, return_freed_memory
from proxy.limits.bodies import Bodies
from proxy.limits.budgets import Budgets
from proxy.limits.calls import Limits, Places
from proxy.metrics import Metrics
from proxy.recent_counts import RecentCounts
from proxy.reload.arms import DRAIN_SECONDS
from proxy.reload.checkpoint import VersionFiles
from proxy.reload.driver import Reloader
from proxy.sessions.place import Sessions
from proxy.settings import ProxySettings
from proxy.workers.peers import Change, EngineReserved, KeysChanged, Peers, SessionChanged, WeightsLoaded
from proxy.writer.client import Writer
from turnwise.errors import EngineUnsuitable, SettingsError, StoreError, TurnwiseError
from turnwise.store import keys, retention, rewards, sessions
from turnwise.store.database import Connection, Database
from turnwise.types import SessionKey, utc_now

log = logging.getLogger(__name__)

NUM_READERS = 8
"""Database connections for reading."""
MAX_SEARCHES = 2
"""Searches in what sessions hold that run at once in one process; others wait."""
NUM_EXPORTS = 4
"""Maximum number of pages of exports that are read at the same time."""
MAX_EXPORTS, MAX_TENANT_EXPORTS = 64, 4
"""Maximum number of concurrent exports, and of those of one tenant; each holds a page of sessions in memory."""
REWARDED_IDLE = datetime.timedelta(minutes=10)
"""A single session that has a reward, and that no call names, ends after so long without activity."""
MIN_CORRECTION = datetime.timedelta(milliseconds=100)
"""Difference of two clocks that counts as a correction of one of them."""
SWEEP_SECONDS = 5.0
"""How often the uses of keys are recorded, idle sessions expired, and old stored answers deleted."""
ANNOUNCE_SECONDS = 1.0
"""How long an engine stays paused at most until all workers have noted what it has loaded."""
GAUGES_SECONDS = 1.0
"""How often a worker stores its gauges for the other workers."""


def elapsed_seconds() -> float:
    """Return seconds of a clock that nobody corrects, and that goes on while the machine is suspended."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class IdleClock:
    """What the wall clock read some time ago: a correction of the wall clock is no time without activity.

    It knows the corrections since this process started.
    """

    def __init__(self, longest: datetime.timedelta) -> None:
        self._longest = longest
        self._corrections: collections.deque[tuple[float, datetime.datetime]] = collections.deque()
        """When the wall clock was corrected, in elapsed seconds, and its time at which these would have been 0 since
        then; the first entry is in force at the begin of the longest time."""

    def earliest(self, ago: datetime.timedelta) -> datetime.datetime:
        """Read the clocks; return the earliest that the wall clock can have read so long ago."""
        now = elapsed_seconds()
        start = utc_now() - datetime.timedelta(seconds=now)
        known = self._corrections
        if not known or abs(start - known[-1][1]) > MIN_CORRECTION:
            known.append((now, start))
        while len(known) > 1 and known[1][0] <= now - self._longest.total_seconds():
            known.popleft()
        return min(start for _, start in known) + datetime.timedelta(seconds=now) - ago


class Services:
    """The services that handle requests, on an open store."""

    def __init__(
        self,
        settings: ProxySettings,
        database: Database,
        authenticator: Authenticator,
        peers: Peers,
        metrics_directory: Path | None,
    ) -> None:
        faults = FaultPoints(settings.fault)
        self.settings = settings
        self.peers = peers
        self.metrics = metrics = Metrics(metrics_directory)
        self.database = database
        self.exports = Database(settings.database.get_secret_value(), pool_size=NUM_EXPORTS)
        """Reads the pages of exports, so that they do not delay other reads."""
        self.exporting = Places("read exports", MAX_EXPORTS, MAX_TENANT_EXPORTS)
        self.writer = Writer(settings, metrics)
        self.pool = EnginePool(
            settings.engine,
            metrics,
            database,
            timeout_seconds=settings.engine_timeout_seconds,
            wait_seconds=settings.engine_wait_seconds,
            gone_seconds=settings.engine_gone_seconds,
            access=Access(bearer_key=settings.engine_api_key, tls=settings.engine_tls()),
        )
        self.upstream = (
            None
            if settings.upstream is None
            else HttpClient(
                settings.upstream,
                connect_seconds=CONNECT_SECONDS,
                silence_seconds=settings.engine_timeout_seconds,
                access=Access(bearer_key=settings.upstream_api_key),
            )
        )
        """Where routes that no engine serves are passed to; None if nowhere."""
        self.model_names = ModelNames(settings.model_names, self.pool, database)
        self.sessions = Sessions(database, self.writer, settings, metrics, faults)
        self._idle_clock = IdleClock(datetime.timedelta(seconds=settings.session_idle_seconds))
        self.retries = Retries(database, settings.replay_bytes)
        self.relay = Relay(self.pool, self.sessions, self.retries, self.writer, settings, metrics, faults)
        self.reloader = Reloader(
            database,
            self.writer,
            self.pool,
            settings,
            metrics,
            check_engine=self._check_engine,
            faults=faults,
            announce=lambda engine: peers.confirm(
                WeightsLoaded(engine.url, str(engine.loaded_version)), ANNOUNCE_SECONDS
            ),
            reserve=lambda engine: peers.confirm(EngineReserved(engine.url), DRAIN_SECONDS + ANNOUNCE_SECONDS),
        )
        self.files = VersionFiles()
        """Reads versions' files for the routes; the reloader has its own instance, to report its own slow reads."""
        self.authenticator = authenticator
        self.limits = Limits(settings, metrics)
        self.bodies = Bodies(settings.max_body_bytes)
        self.budgets = Budgets(settings, database, self.writer, metrics)
        self.counts = RecentCounts(database)
        self.events = Events(database, metrics)
        self.searches = asyncio.Semaphore(MAX_SEARCHES)
        """Places for searches in what sessions hold: each may take a thread and a connection for seconds."""

    def forget_session(self, tenant: str, session_id: str) -> None:
        """Remove a session from the memory of all workers, because its row in the store has changed."""
        self.sessions.cache.drop((tenant, session_id))
        self.peers.announce(SessionChanged(tenant, session_id))

    def forget_keys(self) -> None:
        """Let all workers read keys from the store again."""
        self.authenticator.forget()
        self.peers.announce(KeysChanged())

    async def apply_change(self, change: Change) -> None:
        """Apply what another worker has changed in the store."""
        match change:
            case SessionChanged(tenant, session_id):
                self.sessions.cache.drop((tenant, session_id))
            case KeysChanged():
                self.authenticator.forget()
            case EngineReserved(engine_url):
                engine = self.pool.engine_at(engine_url)
                if engine is not None:
                    await self.pool.drain(engine, DRAIN_SECONDS)
            case WeightsLoaded(engine_url, label):
                self.pool.note_label(engine_url, label)

    async def _check_engine(self, engine: Engine) -> None:
        """Check an engine's features, and reject it if capture would not be exact.

        Raises:
            EngineUnsuitable: it lacks a required feature, and the check is strict.
        """
        is_checked = self.settings.engine_check != "off"
        try:
            if is_checked:
                await check_features(engine)
        except EngineUnsuitable as unsuitable:
            if self.settings.engine_check == "strict":
                raise
            log.warning("%s", unsuitable)
        if self.sessions.template is None:
            found = await find_template(engine, self.settings.tokenizer, is_checked=is_checked)
            self.sessions.learn_template(found)

    async def _record_key_uses(self) -> None:
        used = self.authenticator.used_keys
        while used:
            await self.writer.do(keys.record_use, used.pop())

    async def _prune(self) -> None:
        """Delete sessions that are older than the retention, if one is set."""
        days = self.settings.retention_days
        if days is None:
            return
        deleted = await self.writer.delete_all(retention.prune, utc_now() - datetime.timedelta(days=days))
        for tenant, session_id in deleted.sessions:
            self.forget_session(tenant, session_id)

    async def sweep(self) -> None:
        """Record the uses of keys, expire idle sessions, and delete what is old or deleted, until cancelled."""
        idle = datetime.timedelta(seconds=self.settings.session_idle_seconds)
        remembered = datetime.timedelta(seconds=self.settings.idempotency_seconds)
        while True:
            try:
                await self._record_key_uses()
                while await self.writer.do(rewards.forget_answers, utc_now() - remembered):
                    pass
                await self._close_idle(sessions.end_rewarded_sessions, min(idle, REWARDED_IDLE), "ended")
                await self._close_idle(sessions.expire_idle_sessions, idle, "expired")
                await self._prune()
                has_deleted = self.writer.has_deleted.is_set()
                await self.writer.sweep()
                if has_deleted:
                    await asyncio.to_thread(self.database.truncate_log)
            except TurnwiseError as error:
                self.metrics.background_errors.labels("sweep").inc()
                log.warning("could not record uses of keys, expire sessions and delete old data, will retry: %s", error)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.writer.has_deleted.wait(), SWEEP_SECONDS)

    async def _close_idle(
        self,
        close_some: Callable[[Connection, datetime.datetime], list[SessionKey]],
        idle: datetime.timedelta,
        event: str,
    ) -> None:
        """End or expire what is idle for so long, in short transactions."""
        before = self._idle_clock.earliest(idle)
        while closed := await self.writer.do(close_some, before):
            for tenant, session_id in closed:
                self.forget_session(tenant, session_id)
            self.metrics.sessions.labels(event).inc(len(closed))

    async def close(self) -> None:
        """Wait for running calls to be stored, then close engines, writer and store."""
        with contextlib.suppress(TimeoutError):  # calls that were cut off store what was sampled until then
            await asyncio.wait_for(self.limits.idle.wait(), self.settings.commit_timeout_seconds)
        await self.pool.close()
        if self.upstream is not None:
            await self.upstream.close()
        self.peers.close()
        await self.budgets.close()
        with contextlib.suppress(StoreError):
            await self._record_key_uses()
        await self.writer.close()
        for opened in (self.database, self.exports):
            opened.close()


def services_of(request: Request) -> Services:
    return cast("Services", request.app.state.services)


@contextlib.asynccontextmanager
async def running_services(
    settings: ProxySettings, peers: Peers, metrics_directory: Path | None
) -> AsyncIterator[Services]:
    """Open the store and the engines, start the background tasks, and close everything at the end.

    Raises:
        SettingsError: the proxy would listen on other interfaces than loopback without any API key.
        SchemaMismatch: the store's tables are of another release.
        EngineUnsuitable: an engine lacks a feature that exact capture requires, and the check is strict.
    """
    keep_freed_memory()
    database = Database(settings.database.get_secret_value(), pool_size=NUM_READERS)
    await asyncio.to_thread(database.check_schema)
    authenticator = await asyncio.to_thread(_make_authenticator, database, settings)
    services = Services(settings, database, authenticator, peers, metrics_directory)
    await services.writer.start()
    await peers.connect(services.apply_change)
    await services.reloader.start()
    background = [
        services.reloader.run(),
        ActivityRecorder(services.pool, services.writer, services.metrics).run(),
        services.sweep(),
        _refresh_gauges(services.metrics),
        return_freed_memory(lambda: services.sessions.num_bytes_read),
    ]
    tasks = [asyncio.create_task(each) for each in background]
    try:
        yield services
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await services.close()


def _make_authenticator(database: Database, settings: ProxySettings) -> Authenticator:
    """Read the secret that signs session keys, after checking that a proxy without keys listens on loopback only."""
    with database.write() as connection:
        secret = keys.server_secret(connection)
        has_keys = keys.any_keys(connection)
    if not has_keys and not _is_loopback(settings.host):
        raise SettingsError(
            f"without API keys the proxy serves loopback only, not {settings.host!r}; "
            "make one with `turnwise keys create`"
        )
    if settings.secret is not None:
        secret = settings.secret.get_secret_value().encode()
    return Authenticator(database, secret, has_keys=has_keys)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _refresh_gauges(metrics: Metrics) -> None:
    while True:
        metrics.refresh()
        await asyncio.sleep(GAUGES_SECONDS)
