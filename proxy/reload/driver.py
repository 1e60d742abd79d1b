"""Brings every engine to the version that the store names: which engine first, what is retried, what is taken out.

One process drives at a time, by a lease in the store; the others read the engines' labels. One engine loads a new
version first; the others follow if it succeeds. A version that cannot be loaded is marked failed and the last good one
stays served; a failure that may pass is retried first. Files that take long to read are waited for over many rounds.
An engine that fails later is taken out, and is brought to the active version before it gets calls again. Engines are
checked side by side: one that takes long to answer holds up neither the others nor a new version.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from http import HTTPStatus

from proxy.engines.engine import LOADING, UNLABELLED, Engine, EngineState
from proxy.engines.pool import EnginePool
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.reload.checkpoint import own_model
from proxy.reload.lease import DriverLease
from proxy.reload.parts import CORE, ReloadParts
from proxy.reload.rollout import Rollout
from proxy.reload.version_files import VersionFiles
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from turnwise.engine_routes import ADDRESS_HINT
from turnwise.errors import (
    BadCheckpoint,
    EngineError,
    EngineRefused,
    EngineUnavailable,
    EngineUnsuitable,
    FilesNotRead,
    ReloadFailed,
    SettingsError,
    TurnwiseError,
)
from turnwise.store import keys, versions
from turnwise.store.database import Database
from turnwise.types import DEFAULT_POLICY, PolicyKind, PolicyVersion

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
"""How often a newer policy version is looked for."""
HEALTH_SECONDS = 1.0
"""How often an engine is checked; an absent one is checked as often as policy versions are."""
OWN_MODEL_SECONDS = 5.0
"""How long a round waits for the digest of an engine's own model; a later round waits for the same read."""


class Reloader:
    """Keeps engines on the wanted version."""

    def __init__(
        self,
        database: Database,
        writer: Writer,
        pool: EnginePool,
        settings: ProxySettings,
        metrics: Metrics,
        *,
        check_engine: Callable[[Engine], Awaitable[None]],
        faults: FaultPoints,
        announce: Callable[[Engine], Awaitable[None]],
        confirm: Callable[..., Awaitable[None]],
        files: VersionFiles,
        parts: ReloadParts = CORE,
    ) -> None:
        self._writer = writer
        self._pool = pool
        self._settings = settings
        self._metrics = metrics
        self._check_engine = check_engine
        self.lease = DriverLease(database, writer)
        self._memory = parts.memory(settings, database, pool, self.lease)
        self._loader = parts.loader(database, settings, metrics, faults, self.lease, announce, files)
        pool.load_adapter = self._loader.load_at_call

        def rollout_of(policy_id: int) -> Rollout:
            return parts.rollout(policy_id, database, self.lease, pool, self._loader, settings, metrics, confirm)

        self._rollout_of = rollout_of
        self._default = rollout_of(DEFAULT_POLICY)
        self._rollouts = {DEFAULT_POLICY: self._default}
        self._checks: dict[Engine, asyncio.Task[None]] = {}
        """The checks that run."""
        self._own_models: dict[str, PolicyVersion] = {}

    @property
    def problem(self) -> str | None:
        return self._default.waits_for or self._default.problem or self._loader.files.problem

    @property
    def changes(self) -> Mapping[str, Callable[..., Awaitable[None]]]:
        """What to do when the rollout of another process has told of a change, by its name."""
        return self._default.changes

    async def start(self) -> None:
        """Check the engines once before the first request; `run` waits for those that are absent.

        Raises:
            EngineUnsuitable: an engine lacks what exact capture needs, and the check is strict.
        """
        self._loader.database_id = await self._writer.do(keys.database_id)
        await self._check_engines(self._pool.engines)

    async def run(self) -> None:
        checked_at = 0.0
        try:
            while True:
                is_due = time.monotonic() - checked_at >= HEALTH_SECONDS
                checked_at = time.monotonic() if is_due else checked_at
                engines = [each for each in self._pool.engines if is_due or each.state is EngineState.ABSENT]
                await self._try(self._check_engines(engines, seconds=POLL_SECONDS))
                await self._try(self._follow())
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for check in self._checks.values():
                check.cancel()
            await asyncio.gather(*self._checks.values(), return_exceptions=True)

    async def _try(self, part: Awaitable[None]) -> None:
        """Finish a part of a round, or count and log why it failed; the next round does it again."""
        try:
            with contextlib.suppress(EngineUnsuitable):  # which was said once
                await part
        except TurnwiseError as error:
            self._metrics.background_errors.labels("reload").inc()
            log.warning("the reloader could not finish a round: %s", error)
        except Exception:  # the task's outermost edge: an unexpected error must not end it
            self._metrics.background_errors.labels("reload").inc()
            log.exception("a round of the reloader failed unexpectedly")

    async def _follow(self) -> None:
        await self._pool.refresh()
        self._default.note_round()
        if await self._memory.follow(self._default.state.active):
            return
        if self._pool.serving and self._next_steps():
            with contextlib.suppress(FilesNotRead):  # a later round asks again; the read goes on, and is logged
                await self._drive()

    def _next_steps(self) -> list[tuple[int, Callable[[], Awaitable[None]]]]:
        numbers = sorted({DEFAULT_POLICY, *self._pool.served})
        self._rollouts = {number: self._rollouts.get(number) or self._rollout_of(number) for number in numbers}
        steps = ((number, rollout.next_step()) for number, rollout in self._rollouts.items())
        return [(number, step) for number, step in steps if step is not None]

    async def _drive(self) -> None:
        unread: FilesNotRead | None = None
        async with self.lease.held() as is_driver:
            if is_driver:  # another process may have driven while the lease was awaited
                await self._pool.refresh()
            if self._default.next_step() is not None:
                # Another process may have loaded them.
                await asyncio.gather(*(engine.read_label() for engine in self._pool.serving))
            for policy_id, step in self._next_steps() if is_driver else ():
                if not self._pool.serving:  # the step before has taken the last engine out
                    break
                try:
                    await step()
                except FilesNotRead as error:
                    unread = error
                except (BadCheckpoint, EngineError) as error:
                    self._metrics.background_errors.labels("reload").inc()
                    log.warning("policy %d could not be brought up to date: %s", policy_id, error)
            if unread is not None:
                raise unread

    async def _check_engines(self, engines: list[Engine], *, seconds: float | None = None) -> None:
        """Check which engines answer; one that came back is brought to the active version before it gets calls.

        A check that takes longer than these seconds goes on, and a later round takes what it finds.
        """
        for engine in self._checks.keys() - set(self._pool.engines):  # it has left
            self._checks.pop(engine).cancel()
        for engine in engines:
            if engine not in self._checks:
                self._checks[engine] = asyncio.create_task(self._check(engine))
        if self._checks:
            await asyncio.wait(self._checks.values(), timeout=seconds)
        ended = [engine for engine, check in self._checks.items() if check.done()]
        outcomes = {engine: self._checks.pop(engine).exception() for engine in ended}
        for engine, outcome in outcomes.items():
            if isinstance(outcome, EngineUnsuitable):
                engine.change(EngineState.UNSUITABLE)
            elif isinstance(outcome, EngineError) and engine.is_serving:
                engine.take_out(outcome)
            _note_problem(engine, outcome)
        problems = [outcome for outcome in outcomes.values() if outcome is not None]
        unexpected = [each for each in problems if not isinstance(each, EngineError | BadCheckpoint | FilesNotRead)]
        if said := [*unexpected, *(each for each in problems if isinstance(each, EngineUnsuitable))]:
            raise said[0]

    async def _check(self, engine: Engine) -> None:
        """Check one engine, and let it get calls once it has the active version."""
        await engine.check_health()
        if engine.is_serving and await self._has_lost_weights(engine):
            engine.take_out("it was restarted, and has the weights that it started with")
        if not engine.is_serving:
            await self._admit(engine)
        elif engine.adapter_names:
            await self._unload_unused(engine)

    async def _unload_unused(self, engine: Engine) -> None:
        """Unload this database's adapters without calls, except those that sessions may sample with.

        The latest others stay, one for each policy in use: another process may still call them. An adapter of another
        database is left to it: no call of this one reaches it.
        """
        ended, in_use = self._pool.ended, self._pool.in_use
        ours = self._loader.own_adapters(engine)
        changed = [name for name, number in ours if (lane := engine.adapters.get(number)) and lane.adapter != name]
        unused = [(name, number) for name, number in ours if number not in in_use and name not in changed]
        leaving = [name for name, number in unused if number in ended]
        spared = max(1, len(self._pool.policies))
        for name in changed + leaving + [name for name, number in unused if number not in ended][:-spared]:
            if all(lane.num_calls == 0 for lane in engine.adapters.values() if lane.adapter == name):
                await engine.unload_adapter(name)

    async def _has_lost_weights(self, engine: Engine) -> bool:
        if engine.loaded_version == UNLABELLED or await _has_version(engine):
            return False
        if await self._memory.is_given_up(engine):
            return False
        async with self.lease.held() as is_driver:  # otherwise another process may be exchanging the weights
            return is_driver and not await _has_version(engine)

    async def _admit(self, engine: Engine) -> None:
        """Route calls to an engine that has appeared, once it has the active version and is checked."""
        self._loader.appeared(engine)
        await engine.fetch_models()
        await engine.read_label()
        await self._adopt(engine)
        await self._pool.refresh()
        active = self._default.state.active
        if active is not None and active.kind is PolicyKind.LORA:
            await self._loader.adopt(engine, active)
        if not await self._memory.take_back(engine, active):
            return
        is_right = engine.loaded_version is not None and self._default.is_right(engine)
        if (is_right and not await engine.is_paused()) or await self._restore(engine):
            await self._open(engine)

    async def _restore(self, engine: Engine) -> bool:
        """Load the active version beside other engines that lack it; return False while another process drives."""
        async with self.lease.shared() as is_driver:
            if is_driver:
                await self._pool.refresh()  # a newer version may have become active while the lease was awaited
                await self._loader.restore(engine, self._default.state.active or engine.own_model)
        return is_driver

    async def _open(self, engine: Engine) -> None:
        """Check an engine, again where another one was opened first, and load what has become active meanwhile."""
        was_alone = not self._pool.serving
        await self._check_engine(engine)
        if was_alone and self._pool.serving:
            await self._check_engine(engine)
        await self._pool.refresh()
        if not self._default.is_right(engine) and not await self._restore(engine):
            return
        engine.change(EngineState.READY)
        version = self._pool.version_on(engine)
        self._metrics.policy_version.set(version)
        log.info("the engine at %s serves %s, version %d", engine.url, engine.model, version)

    async def prove(self, engine: Engine) -> None:
        """Compare what an engine has with the probe of the active version, whatever its label says.

        Raises:
            EngineError: it has something else, and loads the version at its next check.
        """
        active = self._default.state.active
        if active is None or active.kind is PolicyKind.LORA:  # an adapter is compared when it is loaded
            return
        try:
            await self._loader.verify(engine.base_lane, active, await self._loader.probe(active, engine))
        except ReloadFailed:
            await engine.label_weights(LOADING)
            raise

    async def _adopt(self, engine: Engine) -> None:
        """Read which model the engine was started with, and let a new database belong to it if its files are here."""
        path = engine.model_path
        if path not in self._own_models:
            key, read = ("own model", path), functools.partial(own_model, path)
            base, is_published = await self._loader.files.read(key, path, read, seconds=OWN_MODEL_SECONDS)
            try:
                if base.model_digest is not None and not is_published and self._settings.engine_check != "off":
                    await self._writer.do(versions.adopt_base, base)
            except SettingsError as error:
                if self._settings.engine_check == "strict":
                    raise EngineUnsuitable(f"the engine at {engine.url}: {error}") from error
                log.warning("the engine at %s: %s", engine.url, error)
            self._own_models[path] = base
        engine.own_model = self._own_models[path]


async def _has_version(engine: Engine) -> bool:
    return (await engine.weights_label() or "").isdigit()


def _note_problem(engine: Engine, outcome: BaseException | None) -> None:
    """Keep why an engine that was checked gets no calls, and log it once; a long read of files logs itself."""
    if engine.is_serving or outcome is None:
        engine.problem = None
        return
    problem = str(outcome)
    if isinstance(outcome, EngineRefused) and outcome.status == HTTPStatus.NOT_FOUND:
        problem += f"; {ADDRESS_HINT}"
    if problem != engine.problem and not isinstance(outcome, FilesNotRead):
        why = outcome.__cause__ if isinstance(outcome, EngineUnavailable) else problem
        level = logging.WARNING if isinstance(outcome, EngineUnsuitable) else logging.INFO
        log.log(level, "the engine at %s does not serve yet: %s", engine.url, why)
    engine.problem = problem
