"""All objects of a proxy process: how they are connected, started and closed, and what other processes' changes do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, cast

from fastapi import Request
from starlette.types import Scope

from proxy.auth import Authenticator, open_authenticator
from proxy.calls.capture import Attempts
from proxy.calls.relay import Relay
from proxy.calls.steps import CallStep, Steps
from proxy.dialects.base import Call, Dialect
from proxy.dialects.registry import CORE as CORE_DIALECTS
from proxy.dialects.registry import Dialects
from proxy.engines.chat_templates import find_template
from proxy.engines.engine import Engine
from proxy.engines.http_client import Access
from proxy.engines.models import Models
from proxy.engines.pool import EnginePool
from proxy.fault import FaultPoints
from proxy.http.asgi import BodyMemory
from proxy.http.connections import RefusedHead
from proxy.metrics import Counted, Metrics
from proxy.reload.driver import Reloader
from proxy.reload.parts import CORE, ReloadParts
from proxy.reload.version_files import ReadingProcess, VersionFiles
from proxy.sessions.forest import Describe
from proxy.sessions.identities import NativeId
from proxy.sessions.place import Sessions, Unnamed
from proxy.sessions.template import ChatTemplate
from proxy.settings import ProxySettings
from proxy.sweeper import Sweeper
from proxy.writer.client import Writer
from turnwise.errors import InvalidRequest, StoreError
from turnwise.settings import READABLE
from turnwise.store.database import Connection, Database, readable_files
from turnwise.telemetry.requests import RequestContext
from turnwise.types import Json, Session, Turn

log = logging.getLogger(__name__)

NUM_READERS = 8
ANNOUNCE_SECONDS = 1.0
"""How long an engine stays paused at most until all processes have noted what it has loaded."""


class Beside:
    """What a feature does beside calls, in each process that serves."""

    counters: ClassVar[Mapping[str, Counted]] = {}
    """Its metrics by the names of its attributes that hold them."""
    gauges: ClassVar[Mapping[str, Counted]] = {}
    """The same of its gauges, which all processes agree on."""

    def __init__(self, services: Services) -> None:
        """Take the services before they are started."""

    async def run(self) -> None:
        """Run until cancelled."""


class Observer:
    """Sees each request from its first byte to its last."""

    def begun(self, context: RequestContext, scope: Scope) -> RequestContext:  # noqa: ARG002
        """Return the ids of a request that has begun."""
        return context

    def ended(self, context: RequestContext, scope: Scope, status: int | None, num_bytes: int, seconds: float) -> None:
        """Take a request after its last byte."""

    def refused(self, head: RefusedHead) -> None:
        """Take a request that was refused by its head alone."""

    def close(self) -> None:
        """End, after the last request."""


class Process:
    """What one process of a proxy does with the others; this one serves alone."""

    is_shared = False
    """Whether calls of a session may reach other processes in its course."""
    stops_at_interrupt = True
    """Whether a terminal's ctrl-C stops it; it reaches all processes."""
    hand_over: Callable[[asyncio.Transport, bytes], bool] | None = None
    """Takes a connection between two requests, and the first bytes of the next; returns whether another took it."""

    def sockets(self, settings: ProxySettings) -> list[socket.socket] | None:  # noqa: ARG002
        """Return the bound sockets to listen on; None lets the server bind them."""
        return None

    async def connect(self, services: Services) -> None:
        """Follow, by `Services.changes`, what others change from now on."""

    def tell(self, change: str, *of: str) -> None:
        """Tell the others what this one has changed."""

    async def confirm(self, seconds: float, change: str, *of: str) -> None:
        """Tell the others what this one has changed, and wait at most so long until they have followed."""

    def started(self, make_protocol: Callable[[bytes], Any]) -> None:
        """Take what others hand over: this process listens. The function makes protocols, of what was read before."""

    def stopping(self) -> None:
        """Take nothing more: this process is about to stop listening."""

    def close(self) -> None:
        """Leave the others."""


class Features(NamedTuple):
    """What stands beside the core in a process that serves; by default nothing."""

    steps: Iterable[type[CallStep]] = ()
    in_store: tuple[str, ...] = ()
    """Modules of what features have in the store."""
    beside: Iterable[type[Beside]] = ()
    reload: ReloadParts = CORE
    """How engines are brought to versions."""
    dialects: Iterable[Dialect] = CORE_DIALECTS
    attempts: type[Attempts] = Attempts
    """Finds which calls get the answer of an earlier one."""
    unnamed: type[Unnamed] = Unnamed
    """Finds the sessions of calls that name none."""
    native_ids: Sequence[NativeId] = ()
    """How harnesses name their sessions."""
    describe: Describe | None = None
    """Returns what a feature keeps of each turn in memory."""
    prepare: Callable[[ChatTemplate], None] = lambda _: None
    """Changes the template that was found, for example so that it takes less time; called in a thread."""


NO_FEATURES = Features()


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
        features: Features,
        process: Process,
    ) -> None:
        faults = FaultPoints(settings.fault)
        self.settings = settings
        self._features, self.process = features, process
        self.dialects = Dialects(features.dialects)
        self.metrics = metrics = Metrics()
        self.database = database
        self.authenticator = authenticator
        self.writer = Writer(settings, metrics, features.in_store)
        self.pool = EnginePool(
            settings.engine,
            metrics,
            database,
            timeout_seconds=settings.engine_timeout_seconds,
            wait_seconds=settings.engine_wait_seconds,
            access=Access(bearer_key=settings.engine_api_key, tls=settings.engine_tls()),
        )
        self.models = Models(self.pool)
        """Which policy the name of a model means; a feature may accept other names than those of the engines."""
        self.take_media: Callable[[Call], Awaitable[None]] = refuse_media
        """What reads the media in a call's messages; without a feature that does, such a call is refused."""
        self.own_arguments: set[str] = set()
        """Arguments of the chat template that features put into requests to engines; those of clients are dropped."""
        self.open_body: Callable[[str, str, dict[bytes, bytes]], BodyMemory] = lambda *_: BodyMemory()
        """What counts the bytes of a request's body: by its tenant, its key and its headers."""
        self.stored_document: Callable[[Any], Any] = lambda document: document
        """What the control plane stores of a JSON document that a client gave; a feature may leave something out."""
        self.stored_text: Callable[[str | None], str | None] = lambda text: text
        """The same of a free text."""
        self.opened: list[Callable[[Session], Session]] = []
        """Rules for a session that is about to be created: each returns it as it is stored."""
        self.reopened: list[Callable[[Session, Session], Awaitable[Session]]] = []
        """Rules for a session that is created again: each takes what is wanted and what is stored, which it returns."""
        self.turn_fields: list[Callable[[Turn], Json]] = []
        """What features add to a turn's JSON."""
        self.ended: list[Callable[[Session], Awaitable[Json]]] = []
        """What features add to the answer that ends a session."""
        self.gauges: list[Callable[[Connection], None]] = []
        """What features read from the store when metrics are asked for."""
        self.engine_checks: list[Callable[[Engine], Awaitable[None]]] = []
        """What features ask of an engine before it gets calls; each may raise `EngineUnsuitable`."""
        self.closing: list[Callable[[], Awaitable[None]]] = []
        """What features end when the process ends and no call runs any more."""
        self.max_calls: float = settings.max_concurrent_calls
        """Most calls that may run at once; a feature whose calls wait in a queue counts them itself."""
        self.observers: list[Observer] = []
        self.steps = Steps(features.steps, self)
        self.writer.row_steps = self.steps.rows
        self.sessions = self._sessions(faults)
        self.native_ids = features.native_ids
        self.attempts = features.attempts(database, settings.cache_share("answers"))
        self.relay = Relay(self.pool, self.sessions, self.attempts, self.steps, self.writer, settings, metrics, faults)
        self.reading = ReadingProcess()
        self.files = VersionFiles(self.reading)
        """Reads versions' files for the routes; the reloader has its own instance, to report its own slow reads."""
        self.reloader = self._reloader(faults)
        self.num_calls = 0
        """Calls that run: from their admission, which counts them, to the last byte of their reply."""
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self.sweeper = Sweeper(settings, database, authenticator, self.writer, metrics, self.forget_session)
        self.beside: dict[type[Beside], Any] = {kind: self._made(kind) for kind in features.beside}
        """What features do beside calls, by its class."""

    def _made(self, kind: type[Beside]) -> Beside:
        made = kind(self)
        vars(made).update({name: self.metrics.counter(*each) for name, each in kind.counters.items()})
        vars(made).update({name: self.metrics.newest(*each) for name, each in kind.gauges.items()})
        return made

    def _sessions(self, faults: FaultPoints) -> Sessions:
        return Sessions(
            self.database,
            self.writer,
            self.settings,
            self.metrics,
            faults,
            self.pool.context_tokens,
            is_shared=self.process.is_shared,
            unnamed=self._features.unnamed,
            opened=self.opened,
            entering=self.steps.entering,
            describe=self._features.describe,
        )

    def _reloader(self, faults: FaultPoints) -> Reloader:
        return Reloader(
            self.database,
            self.writer,
            self.pool,
            self.settings,
            self.metrics,
            check_engine=self._check_engine,
            faults=faults,
            announce=lambda engine: self.process.confirm(
                ANNOUNCE_SECONDS, "weights", engine.url, str(engine.loaded_version)
            ),
            confirm=self.process.confirm,
            files=VersionFiles(self.reading),
            parts=self._features.reload,
        )

    def forget_session(self, tenant: str, session_id: str) -> None:
        """Remove a session from the memory of all processes, because its row in the store has changed."""
        self.sessions.cache.drop((tenant, session_id))
        self.process.tell("session", tenant, session_id)

    def forget_keys(self) -> None:
        self.authenticator.forget()
        self.process.tell("keys")

    @property
    def changes(self) -> Mapping[str, Callable[..., Awaitable[None]]]:
        """What to do when another process has changed something, by its name."""

        async def session(tenant: str, session_id: str) -> None:
            self.sessions.cache.drop((tenant, session_id))

        async def keys() -> None:
            self.authenticator.forget()

        async def weights(engine_url: str, label: str) -> None:
            self.pool.note_label(engine_url, label)

        return {"session": session, "keys": keys, "weights": weights, **self.reloader.changes}

    async def _check_engine(self, engine: Engine) -> None:
        """Let features check an engine, and find its chat template.

        Raises:
            EngineUnsuitable: a feature rejects it.
        """
        for check in self.engine_checks:
            await check(engine)
        if self.sessions.template is None:
            is_checked = self.settings.engine_check != "off"
            found = await find_template(engine, self.settings.tokenizer, is_checked=is_checked)
            if found is not None:
                await asyncio.to_thread(self._features.prepare, found)
            if self.sessions.template is None:  # another engine may have been the first
                self.sessions.learn_template(found)

    async def close(self) -> None:
        """Wait for running calls to be stored, then close engines, writer and store."""
        with contextlib.suppress(TimeoutError):  # calls that were cut off store what was sampled until then
            async with asyncio.timeout(self.settings.commit_timeout_seconds):
                await self.idle.wait()
        await self.pool.close()
        self.reading.close()
        self.process.close()
        for close in self.closing:
            await close()
        with contextlib.suppress(StoreError):
            await self.sweeper.record_key_uses()
        await self.writer.close()
        self.database.close()


def services_of(request: Request) -> Services:
    return cast("Services", request.app.state.services)


@contextlib.asynccontextmanager
async def running_services(
    settings: ProxySettings, features: Features = NO_FEATURES, process: Process | None = None
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
    services = Services(settings, database, authenticator, features, process or Process())
    await services.writer.start()
    await services.reading.start()
    await services.process.connect(services)
    await services.reloader.start()
    background = [
        services.reloader.run(),
        services.sweeper.run(),
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
