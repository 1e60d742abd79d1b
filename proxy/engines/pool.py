"""Which engine a session's calls go to, which version a model's name means, and how long a call waits for an engine.

A session goes to the same serving engine each time, by rendezvous hashing of its id, so that its prefix cache is warm
and the loss of an engine moves only that engine's sessions. While an engine's weights are exchanged its new calls wait
here; while no engine serves but one is expected back, all new calls wait for up to `engine_wait_seconds`.

Which versions are served is read from the store: at an interval by the background task, and by each call too where
another process may just have changed what the call's session samples with.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from hashlib import blake2b
from typing import Any, TypeVar

from proxy.engines.engine import Engine, EngineState, Lane
from proxy.engines.http_client import Access, Broken, NotConnected
from proxy.metrics import Metrics
from turnwise.errors import Conflict, EngineUnavailable
from turnwise.store import policies, serving
from turnwise.store.database import Connection, Database
from turnwise.types import DEFAULT_POLICY, DEFAULT_POLICY_NAME, Policy, PolicyKind, PolicyStatus, PolicyVersion, Session

Asked = TypeVar("Asked")
DRAIN_POLL_SECONDS = 0.2
OWN_MODEL = PolicyVersion(version=0, path="")
"""What a policy without versions samples with."""


class EnginePool:
    """Routes calls to engines."""

    def __init__(
        self,
        urls: list[str],
        metrics: Metrics,
        database: Database,
        *,
        timeout_seconds: float,
        wait_seconds: float = 0.0,
        access: Access | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "access": access}
        self.engines: list[Engine] = []
        self.serving: list[Engine] = []
        """Engines that calls are routed to; another list after each change."""
        self._not_draining: list[Engine] = []
        """Those of them that take new calls; all if all are draining."""
        self.policies: Mapping[int, Policy] = {}
        """All policies by number."""
        self.policy_names: Mapping[int, str] = {DEFAULT_POLICY: DEFAULT_POLICY_NAME}
        self.archived: Collection[int] = ()
        """The numbers of the policies that are archived."""
        self.in_use: set[int] = set()
        """The versions that sessions of any policy may sample with."""
        self.ended: set[int] = set()
        """The versions that sessions of policies sampled with which were then archived or deleted."""
        self.read_at = 0.0
        """When the newest reading of all this that was applied started, on the monotonic clock."""
        self.served: Mapping[int, serving.ServingState] = {}
        """The versions of each policy that has any, by its number: the active version, the adapter that it starts from
        before its first version, and those that only some sessions sample with."""
        self.load_adapter: Callable[[Engine, int], Awaitable[Lane]] | None = None
        """Loads an adapter into an engine at the call that needs it."""
        self._database = database
        self._reading: asyncio.Task[None] | None = None
        self._next_reading: asyncio.Task[None] | None = None
        """A reading that has not started yet."""
        self._num_notes = 0
        """Changes that other processes announced; the last reading includes the first `_num_noted` of them."""
        self._num_noted = 0
        self._metrics = metrics
        self._wait_seconds = wait_seconds
        self.expects_more = False
        """Whether engines may still be named that are not known yet, so that calls wait for them."""
        self.naming_problem: str | None = None
        """Why it cannot be read which engines there are."""
        self._in_flight = 0
        self._changed = asyncio.Event()
        metrics.compute(metrics.in_flight, lambda: self._in_flight)
        for url in urls:
            self.add(url)

    def add(self, url: str) -> Engine:
        """Take an engine that gets calls once the reloader has admitted it."""
        engine, metrics = Engine(url, **self._options), self._metrics
        engine.on_change = functools.partial(self._note_change, engine)
        metrics.engine_up.labels(engine.url).set(0)
        engine.observe_head = metrics.engine_seconds.labels(engine.url).observe
        metrics.compute(metrics.engine_calls.labels(engine.url), lambda: engine.num_calls)
        self.engines = [*self.engines, engine]
        return engine

    async def remove(self, engine: Engine) -> None:
        """Give an engine no call any more, and close its connections when its last one has ended."""
        self.engines = [each for each in self.engines if each is not engine]
        self._note_change(engine)
        self._metrics.engine_up.labels(engine.url).set(0)
        try:
            while engine.num_calls:  # noqa: ASYNC110  the calls end in many places
                await asyncio.sleep(DRAIN_POLL_SECONDS)
            if self.engine_at(engine.url) is None:  # it may have come back meanwhile
                self._metrics.stop_computing(self._metrics.engine_calls.labels(engine.url))
        finally:
            await engine.close()

    def context_tokens(self) -> float:
        """Return the most tokens of a prompt that one of the serving engines takes."""
        return max((engine.context_tokens for engine in self.serving), default=math.inf)

    def _note_change(self, engine: Engine) -> None:
        self.serving = [each for each in self.engines if each.is_serving]
        taking = [each for each in self.serving if each.state is not EngineState.DRAINING]
        self._not_draining = taking or self.serving
        self._metrics.engine_up.labels(engine.url).set(engine.is_serving)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def state(self, policy_id: int) -> serving.ServingState:
        """Return the versions of a policy, as the newest reading found them."""
        return self.served.get(policy_id, serving.NO_VERSIONS)

    async def refresh(self) -> None:
        """Read the policies and their versions, from now on; calls that arrive meanwhile share the next reading.

        Raises:
            StoreError: the store does not answer.
        """
        if self._next_reading is None:
            self._next_reading = asyncio.create_task(self._read_after(self._reading))
        await asyncio.shield(self._next_reading)

    async def _read_after(self, running: asyncio.Task[None] | None) -> None:
        if running is not None and not running.done():
            await asyncio.wait({running})
        self._reading, self._next_reading = self._next_reading, None
        read_at = time.monotonic()
        states, named = await self._database.fetch(_read)
        self.policies = {policy.policy_id: policy for policy in named}
        self.policy_names = {policy.policy_id: policy.name for policy in named}
        self.archived = {each.policy_id for each in named if each.archived_at is not None}
        live = self.policy_names.keys() - self.archived
        self.ended = self.ended.union(*(state.in_use for number, state in self.served.items() if number not in live))
        self.served = states
        self.in_use = set().union(*(state.in_use for state in states.values()))
        self.read_at = read_at

    def check_in_use(self, policy_id: int) -> None:
        """Check that sessions may sample with a policy.

        Raises:
            Conflict: it is archived.
        """
        if policy_id in self.archived:
            name = self.policy_names[policy_id]
            raise Conflict(
                f"policy {name!r} is archived; `turnwise policies unarchive {name}` takes it into use again",
                param="policy",
                code="policy_archived",
            )

    async def ask(self, key: str, question: Callable[[Engine], Awaitable[Asked]]) -> Asked:
        """Ask the serving engine of a key, such as an API key's id, and another one where that is lost.

        Raises:
            EngineUnavailable: none serves, or none answers.
            EngineRefused: it answers an error status.
        """
        engines = self.serving
        while True:
            engine = self._choose(key, engines)
            try:
                return await question(engine)
            except EngineUnavailable as error:
                engines = [each for each in engines if each is not engine]
                if not engines or not isinstance(error.__cause__, NotConnected | Broken):
                    raise

    def version_on(self, engine: Engine) -> int:
        """Return the version that the default policy's calls sample with on an engine."""
        return engine.lane_of(self.state(DEFAULT_POLICY).active or OWN_MODEL).version

    def lane(self, session: Session, wanted: PolicyVersion | None = None, *, avoided: Engine | None = None) -> Lane:
        """Return what the session's calls sample with now; its engine may not have that adapter yet.

        Args:
            session: the calls' session.
            wanted: the version that a call asks for; None for the one that is served to its session.
            avoided: an engine that it must not be.

        Raises:
            EngineUnavailable: when no engine serves.
            Conflict: when no engine has the whole weights that are wanted, or the policy is archived.
        """
        if session.policy_id in self.archived:
            self.check_in_use(session.policy_id)
        state = self.served.get(session.policy_id, serving.NO_VERSIONS)
        served = state.served or OWN_MODEL
        chosen = wanted or (None if session.arm is None else state.of_session(session))
        version = chosen or served
        engines = [engine for engine in self._not_draining if engine is not avoided] if avoided else self._not_draining
        if version.kind is PolicyKind.LORA:
            fit = [engine for engine in engines if not engine.base_lane.version]
        elif chosen:
            fit = [engine for engine in engines if engine.base_lane.version == version.version]
        elif state.beside:
            others = {each.version for each in state.beside.values()}
            fit = [engine for engine in engines if engine.base_lane.version not in others]
        else:
            fit = engines
        if not fit:
            if wanted and engines:
                raise Conflict(
                    f"version {wanted.version} needs whole weights that no engine has now: ask for another version, "
                    "or for the served one",
                    param="model",
                    code="version_not_loaded",
                )
            # Sessions whose version has no engine left are better served by another one than not at all.
            version, fit = served, engines
        return self._choose(session.session_id, fit).lane_of(version)

    def _choose(self, key: str, engines: list[Engine]) -> Engine:
        if not engines:
            raise EngineUnavailable(
                f"{len(self.engines)} engines are known and none is ready; check /readyz and its log, then retry"
            )
        if len(engines) == 1:
            return engines[0]
        return max(engines, key=lambda engine: blake2b(f"{engine.url} {key}".encode(), digest_size=8).digest())

    def engine_at(self, url: str) -> Engine | None:
        """Return the engine with this address; None if there is none."""
        return next((engine for engine in self.engines if engine.url == url), None)

    def note_label(self, url: str, label: str) -> None:
        """Note that an engine's base weights, which another process has loaded, have this label."""
        self._num_notes += 1  # the next call reads who samples with them
        engine = self.engine_at(url)
        if engine is not None:
            engine.apply_label(label)
            if engine.state is EngineState.DRAINING:
                engine.change(EngineState.READY)

    async def wait_for_first(self) -> bool:
        """Wait while no engine serves and one is expected; return whether one serves now."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._wait_seconds):
                while not self.serving and self._is_one_expected():
                    await self._changed.wait()
        return bool(self.serving)

    def _is_one_expected(self) -> bool:
        return self.expects_more or any(engine.state is EngineState.ABSENT for engine in self.engines)

    async def admit(
        self,
        session: Session,
        version: PolicyVersion | None = None,
        *,
        has_waited: bool = False,
        avoided: Engine | None = None,
    ) -> Lane:
        """Wait for an engine, and return the lane that the call takes.

        The caller gives the lane to `release` exactly once.

        Args:
            session: the call's session.
            version: the version that the call asks for; None for the one that is served to its session's policy.
            has_waited: whether the call has waited for an engine already, so that it waits no longer.
            avoided: the engine that has lost the call, which waits for no other.

        Raises:
            Conflict: no engine has the whole weights that the call asks for, or the policy is archived.
            ReloadFailed: the engine did not load the adapter.
            EngineUnavailable: no engine serves, and none came back in time.
            StoreError: a trial runs, and the store does not say whether it still does.
        """
        # Another process may have started or ended a trial: without a reading, a session could enter it after it has
        # left it, or a call outside the trial could sample with the version on trial.
        num_notes, served = self._num_notes, self.served.get(session.policy_id, serving.NO_VERSIONS)
        self._in_flight += 1
        try:
            if PolicyStatus.CANARY in served.beside or session.arm is not None or self._num_noted < num_notes:
                await self.refresh()
                self._num_noted = max(self._num_noted, num_notes)
            while True:
                try:
                    lane = self.lane(session, version, avoided=avoided)
                except EngineUnavailable:
                    if has_waited or avoided is not None or not await self.wait_for_first():
                        raise
                    continue
                if lane.engine.state is not EngineState.RELOADING:  # a reload has a deadline of its own
                    break
                await self._changed.wait()
            if lane.adapter is not None:
                lane = await self.loaded(lane)
        except BaseException:
            self._in_flight -= 1
            raise
        lane.num_calls += 1
        lane.engine.num_started += 1
        return lane

    async def loaded(self, lane: Lane) -> Lane:
        """Return the lane of an adapter once its engine has it.

        Raises:
            ReloadFailed: the engine did not load the adapter.
        """
        if lane.adapter is None:
            return lane
        if lane.version in lane.engine.adapters:
            return lane.engine.adapters[lane.version]
        assert self.load_adapter is not None, "a reloader has told the pool which adapters there are"
        return await self.load_adapter(lane.engine, lane.version)

    async def load_again(self, lane: Lane) -> None:
        """Load an adapter again that its engine has lost, in a restart or because another process unloaded it.

        Raises:
            ReloadFailed: the engine did not load it.
        """
        lane.engine.adapters.pop(lane.version, None)
        lane.adapter = (await self.loaded(lane)).adapter
        lane.engine.adapters[lane.version] = lane  # which counts the calls that run

    def release(self, lane: Lane) -> None:
        lane.num_calls -= 1
        self._in_flight -= 1

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


def _read(connection: Connection) -> tuple[dict[int, serving.ServingState], list[Policy]]:
    return serving.serving_states(connection), policies.list_policies(connection)
