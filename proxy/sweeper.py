"""What becomes old: idle sessions are closed, and stored answers deleted."""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable

from proxy.auth import Authenticator
from proxy.metrics import Metrics
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.errors import TurnwiseError
from turnwise.store import keys, rewards, sessions
from turnwise.store.database import Connection, Database, IdleClock
from turnwise.types import SessionKey, utc_now

log = logging.getLogger(__name__)

REMEMBERED = datetime.timedelta(days=1)
"""How long an `Idempotency-Key` of rewards, of feedback, or of a call that names no session is recognised."""
SWEEP_SECONDS = 5.0
"""How often the uses of keys are recorded, idle sessions expired, and old stored answers deleted."""


class Sweeper:
    """Sweeps every few seconds."""

    def __init__(
        self,
        settings: ProxySettings,
        database: Database,
        authenticator: Authenticator,
        writer: Writer,
        metrics: Metrics,
        forget_session: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._database = database
        self._authenticator = authenticator
        self._writer = writer
        self._metrics = metrics
        self._forget_session = forget_session
        """Removes a session of a tenant from the memory of all workers."""
        self._idle_clock = IdleClock(datetime.timedelta(seconds=settings.session_idle_seconds))

    async def run(self) -> None:
        """Record the uses of keys, expire idle sessions, and delete old stored answers, until cancelled."""
        idle = datetime.timedelta(seconds=self._settings.session_idle_seconds)
        while True:
            try:
                await self.record_key_uses()
                while await self._writer.do(rewards.forget_answers, utc_now() - REMEMBERED):
                    pass
                await self._close_idle(sessions.end_rewarded_sessions, min(idle, sessions.REWARDED_IDLE), "ended")
                await self._close_idle(sessions.expire_idle_sessions, idle, "expired")
            except TurnwiseError as error:
                self._metrics.background_errors.labels("sweep").inc()
                log.warning(
                    "could not record uses of keys, expire sessions and delete old answers, will retry: %s", error
                )
            except Exception:  # the task's outermost edge: an unexpected error must not end it
                self._metrics.background_errors.labels("sweep").inc()
                log.exception("a sweep failed unexpectedly, will retry")
            await asyncio.sleep(SWEEP_SECONDS)

    async def record_key_uses(self) -> None:
        used = self._authenticator.used_keys
        while used:
            await self._writer.do(keys.record_use, used.pop())

    async def _close_idle(
        self,
        close_some: Callable[[Connection, datetime.datetime], list[SessionKey]],
        idle: datetime.timedelta,
        event: str,
    ) -> None:
        """End or expire what is idle for so long, in short transactions."""
        before = self._idle_clock.earliest(utc_now(), idle)
        while closed := await self._writer.do(close_some, before):
            for tenant, session_id in closed:
                self._forget_session(tenant, session_id)
            self._metrics.sessions.labels(event).inc(len(closed))
