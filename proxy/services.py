"""All objects of a proxy process: how they are connected, started and closed, and what other processes' changes do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, cast

from fastapi import Request

from proxy.auth import Authenticator, Principal, open_authenticator
from proxy.calls.relay import Relay
from proxy.calls.retries import Retries
from proxy.calls.steps import CallStep, Steps
from proxy.dialects.base import Call
from proxy.engines.checks import check_features, find_template
from proxy.engines.engine import Engine
from proxy.engines.http_client import Access
from proxy.engines.pool import DRAIN_SECONDS, EnginePool
from proxy.fault import FaultPoints
from proxy.http.bodies import Bodies
from proxy.metrics import Metrics
from proxy.reload.driver import Reloader
from proxy.reload.parts import CORE, ReloadParts
from proxy.reload.version_files import ReadingProcess, VersionFiles
from proxy.sessions.place import Sessions
from proxy.settings import ProxySettings
from proxy.sweeper import Sweeper
from proxy.workers.peers import Change, EngineReserved, KeysChanged, Peers, SessionChanged, WeightsLoaded
from proxy.writer.client import Writer
from turnwise.errors import EngineUnsuitable, InvalidRequest, StoreError
from turnwise.settings import READABLE
from turnwise.store.database import Database, readable_files
from turnwise.types import Session

log = logging.getLogger(__name__)

NUM_READERS = 8
ANNOUNCE_SECONDS = 1.0
"""How long an engine stays paused at most until all workers have noted what it has loaded."""
GAUGES_SECONDS = 1.0
"""How often a worker stores its gauges for the other workers."""


class Beside:
    """What a feature does beside calls, in each process that serves."""

    def __init__(self, services: Services) -> None:
        """Take the services before they are started."""

    async def run(self) -> None:
        """Run until cancelled."""


class Consents(Protocol):
    """Withdraws consent; a feature provides it."""

    async def narrow(self, wanted: Session, stored: Session) -> Session:
        """Return a stored session with what a request for it denies, stored as well."""


class TokenBudgets(Protocol):
    """Counts the tokens of callers; a feature provides it."""

    are_set: bool
    """Whether every caller's tokens are counted; otherwise those of keys with a budget of their own."""

    async def check(self, principal: Principal) -> None:
        """Check that the caller's key and tenant have tokens left."""

    def charge(self, principal: Principal, num_tokens: int) -> None:
        """Add tokens to those that the caller has used."""


async def refuse_media(call: Call) -> None:
    """Refuse a call with media: an engine would fetch what their URLs name."""
    raise InvalidRequest(
        f"the {call.dialect.name} call has media, and this proxy serves text alone; send it without", param="messages"
    )


class Services:
    """The services that handle requests, on an open store."""

    def __init__(
        self,
        settings: ProxySettings,
        database: Database,
        authenticator: Authenticator,
        peers: Peers,
        metrics_directory: Path | None,
        steps: Iterable[type[CallStep]] = (),
        in_store: tuple[str, ...] = (),
        beside: Iterable[type[Beside]] = (),
        reload_parts: ReloadParts = CORE,
    ) -> None:
        """Connect the services.

        `steps` are those of all features, `in_store` the modules of what they have in the store, `beside` what they do
        beside calls, and `reload_parts` how engines are brought to versions.
        """
        faults = FaultPoints(settings.fault)
        self.settings = settings
        self.peers = peers
        self.metrics = metrics = Metrics(metrics_directory)
        self.database = database
        self.writer = Writer(settings, metrics, in_store)
        self.pool = EnginePool(
            settings.engine,
            metrics,
            database,
            timeout_seconds=settings.engine_timeout_seconds,
            wait_seconds=settings.engine_wait_seconds,
            access=Access(bearer_key=settings.engine_api_key, tls=settings.engine_tls()),
            model_names=settings.model_names,
        )
        self.take_media: Callable[[Call], Awaitable[None]] = refuse_media
        """What reads the media in a call's messages; without a feature that does, such a call is refused."""
        self.redact: Callable[[Any], Any] | None = None
        """What a feature leaves of a document that a client gave; None stores it as it is."""
        self.consents: Consents | None = None
        """What withdraws consent to sessions; None without such a feature."""
        self.budgets: TokenBudgets | None = None
        """What counts the tokens of callers; None without such a feature."""
        self.steps = Steps(steps, self)
        self.writer.row_steps = self.steps.rows
        self.sessions = Sessions(
            database,
            self.writer,
            settings,
            metrics,
            faults,
            self.pool.context_tokens,
            opened=self.steps.opened,
            entered=self.steps.entered,
        )
        self.retries = Retries(database, settings.cache_share("answers"))
        self.relay = Relay(self.pool, self.sessions, self.retries, self.steps, self.writer, settings, metrics, faults)
        self.reading = ReadingProcess()
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
            files=VersionFiles(self.reading),
            parts=reload_parts,
        )
        self.files = VersionFiles(self.reading)
        """Reads versions' files for the routes; the reloader has its own instance, to report its own slow reads."""
        self.authenticator = authenticator
        self.num_calls = 0
        """Calls that run: from their admission, which counts them, to the last byte of their reply."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.bodies = Bodies(settings.max_body_bytes)
        self.sweeper = Sweeper(settings, database, authenticator, self.writer, metrics, self.forget_session)
        self.beside: dict[type[Beside], Any] = {kind: kind(self) for kind in beside}
        """What features do beside calls, by its class."""

    def forget_session(self, tenant: str, session_id: str) -> None:
        """Remove a session from the memory of all workers, because its row in the store has changed."""
        self.sessions.cache.drop((tenant, session_id))
        self.peers.announce(SessionChanged(tenant, session_id))

    def redacted(self, document: Any) -> Any:
        """Return what the control plane stores of a JSON document that a client gave."""
        return document if self.redact is None else self.redact(document)

    def redacted_text(self, text: str | None) -> str | None:
        """Return what is stored of a free text; `redactor_failed` where that cannot be found, as with turns."""
        try:
            return cast("str | None", self.redacted(text))
        except Exception:  # the redactor is another program's
            log.exception("the redactor failed at a reason or a note, which is stored without its text")
            return "redactor_failed"

    def forget_keys(self) -> None:
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

    async def close(self) -> None:
        """Wait for running calls to be stored, then close engines, writer and store."""
        with contextlib.suppress(TimeoutError):  # calls that were cut off store what was sampled until then
            await asyncio.wait_for(self.idle.wait(), self.settings.commit_timeout_seconds)
        await self.pool.close()
        self.reading.close()
        self.peers.close()
        await self.steps.close()
        with contextlib.suppress(StoreError):
            await self.sweeper.record_key_uses()
        await self.writer.close()
        self.database.close()


def services_of(request: Request) -> Services:
    return cast("Services", request.app.state.services)


@contextlib.asynccontextmanager
async def running_services(
    settings: ProxySettings,
    peers: Peers,
    metrics_directory: Path | None,
    steps: Iterable[type[CallStep]] = (),
    in_store: tuple[str, ...] = (),
    beside: Iterable[type[Beside]] = (),
    reload_parts: ReloadParts = CORE,
) -> AsyncIterator[Services]:
    """Open the store and the engines, start the background tasks, and close everything at the end.

    Raises:
        SettingsError: the proxy would listen on other interfaces than loopback without any API key.
        SchemaMismatch: the store's tables are of another release.
        EngineUnsuitable: an engine lacks a feature that exact capture requires, and the check is strict.
    """
    database = Database(settings.database.get_secret_value(), pool_size=NUM_READERS)
    await asyncio.to_thread(database.check_schema)
    for file in readable_files(settings.database.get_secret_value()):
        log.warning(READABLE, file, file)
    authenticator = await asyncio.to_thread(open_authenticator, database, settings)
    services = Services(
        settings, database, authenticator, peers, metrics_directory, steps, in_store, beside, reload_parts
    )
    await services.writer.start()
    await services.reading.start()
    await peers.connect(services.apply_change)
    await services.reloader.start()
    background = [
        services.reloader.run(),
        services.sweeper.run(),
        _refresh_gauges(services.metrics),
        *(each.run() for each in services.beside.values()),
    ]
    tasks = [asyncio.create_task(each) for each in background]
    try:
        yield services
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await services.close()


async def _refresh_gauges(metrics: Metrics) -> None:
    while True:
        metrics.refresh()
        await asyncio.sleep(GAUGES_SECONDS)
