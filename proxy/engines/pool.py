"""Which engine a session's calls go to, which version a model's name means, and how long a call waits for an engine.

A session goes to the same serving engine each time, by rendezvous hashing of its id, so that its prefix cache is warm
and the loss of an engine moves only that engine's sessions. While an engine's weights are exchanged its new calls wait
here; while no engine serves but one is expected back, all new calls wait for up to `engine_wait_seconds`.

Which versions are served is read from the store: at an interval by the background task, and during a trial by each call
too, because a session that has left a trial must not enter it again at a process that has not noticed the end. A call
names as its model a policy, one of its versions, or a name that the setting `model_names` accepts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import math
import re
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from fnmatch import fnmatchcase
from hashlib import blake2b
from typing import Any, Literal

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.engines.engine import Engine, EngineState, Lane
from proxy.engines.http_client import Access
from proxy.metrics import Metrics
from turnwise.adapter_names import is_adapter_name
from turnwise.errors import Conflict, EngineUnavailable, NotFound
from turnwise.store import policies, schema, serving, versions
from turnwise.store.database import Connection, Database
from turnwise.types import (
    DEFAULT_POLICY,
    DEFAULT_POLICY_NAME,
    Json,
    Policy,
    PolicyKind,
    PolicyStatus,
    PolicyVersion,
    Session,
)

DRAIN_SECONDS = 10.0
"""How long an engine waits for its running calls before other whole weights are loaded; longer calls span both."""
DRAIN_POLL_SECONDS = 0.02
"""How often it is checked whether the calls of a draining engine have ended."""
OWN_MODEL = PolicyVersion(version=0, path="")
"""What a policy without versions samples with."""
MAX_NAME_LENGTH = 256
_VERSION = re.compile(r"[0-9]{1,9}")


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
        model_names: Mapping[str, Literal["policy", "refuse"]] | None = None,
    ) -> None:
        options: dict[str, Any] = {"timeout_seconds": timeout_seconds, "access": access}
        self.engines: list[Engine] = [Engine(url, **options) for url in urls]
        self.serving: list[Engine] = []
        """Engines that calls are routed to; another list after each change."""
        self._not_draining: list[Engine] = []
        """Those of them that take new calls; all if all are draining."""
        self.policies: Mapping[tuple[str, str], Policy] = {}
        """The named policies by tenant and name."""
        self.policy_names: Mapping[int, str] = {DEFAULT_POLICY: DEFAULT_POLICY_NAME}
        """Their names by number."""
        self.archived: Collection[int] = ()
        """The numbers of those that are archived."""
        self.in_use: set[int] = set()
        """The versions that sessions of any policy may sample with."""
        self.ended: set[int] = set()
        """The versions that sessions of policies sampled with which were then archived or deleted."""
        self.read_at = 0.0
        """When the newest reading of all this that was applied started, on the monotonic clock."""
        self.served: Mapping[int, serving.ServingState] = {}
        """The versions of each policy that has any, by its number: the active version, the adapter that it starts from
        before its first version, and the versions of its arms. Only sessions of an arm sample with its version."""
        self.load_adapter: Callable[[Engine, int], Awaitable[Lane]] | None = None
        """Loads an adapter into an engine at the call that needs it."""
        self._name_rules = model_names or {}
        self._database = database
        self._reading: asyncio.Task[None] | None = None
        self._next_reading: asyncio.Task[None] | None = None
        """A reading that has not started yet."""
        self._num_notes = 0
        """Changes that other processes announced; the last reading includes the first `_num_noted` of them."""
        self._num_noted = 0
        self._metrics = metrics
        self._wait_seconds = wait_seconds
        self._in_flight = 0
        self._changed = asyncio.Event()
        metrics.compute(metrics.in_flight, lambda: self._in_flight)
        for engine in self.engines:
            engine.on_change = functools.partial(self._note_change, engine)
            metrics.engine_up.labels(engine.url).set(0)
            engine.wait_for_any = self.wait_for_first
            engine.observe_head = metrics.engine_seconds.labels(engine.url).observe
            metrics.compute(metrics.engine_calls.labels(engine.url), functools.partial(_num_calls, engine))

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
        self.policies = {(policy.tenant, policy.name): policy for policy in named}
        self.policy_names = {policy.policy_id: policy.name for policy in named}
        self.archived = {each.policy_id for each in named if each.archived_at is not None}
        live = self.policy_names.keys() - self.archived
        self.ended = self.ended.union(*(state.in_use for number, state in self.served.items() if number not in live))
        self.served = states
        self.in_use = set().union(*(state.in_use for state in states.values()))
        self.read_at = read_at

    def find_policy(self, tenant: str, name: str, model: str | None = None) -> Policy | None:
        """Return the policy that a model names; None for a model that stands for the served policy, as an empty one.

        Args:
            tenant: the caller's.
            name: of a policy of the tenant, or of the default policy.
            model: the name and a version; None where it is the name alone.

        Raises:
            NotFound: the model is of no policy, and does not stand for the served one.
        """
        policy = self.policies.get((schema.NO_TENANT if name == DEFAULT_POLICY_NAME else tenant, name))
        model = name if model is None else model
        served = {engine.model for engine in self.engines}
        if policy is not None or not model or model in served or self._stands_for_policy(model):
            return policy
        if is_adapter_name(model):
            hint = "the proxy itself chooses the policy version of a call"
        else:
            hint = "the setting `model_names` says which other names are accepted"
        raise NotFound(
            f"model {model!r:.80} is not served; ask for {', '.join(map(repr, sorted(served)))}; {hint}",
            param="model",
            code="model_not_found",
        )

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

    async def name_policy(self, call: Call, principal: Principal) -> None:
        """Set the policy, and its version, that a call names as its model; check a name that is of no policy.

        `NAME` is a policy of the caller's tenant or `default`, and `NAME@VERSION` is one of its versions. Another
        tenant's policy is a name like any other.

        Raises:
            NotFound: the policy has no such version, or the name is not served.
            Conflict: the version failed, or the policy is archived.
        """
        call.policy_id = principal.policy_id
        name, _, number = call.model.rpartition("@")
        named = name if _VERSION.fullmatch(number) else call.model
        policy = self.find_policy(principal.tenant, named, call.model)
        if policy is None:
            if self.archived:
                self.check_in_use(principal.policy_id)
            return
        self.check_in_use(policy.policy_id)
        call.policy_id, call.names_policy, is_version = policy.policy_id, True, named != call.model
        if is_version and (policy.policy_id, int(number)) == (DEFAULT_POLICY, 0):
            call.policy_version = OWN_MODEL
        elif is_version:
            call.policy_version = await self._read_version(policy, int(number))

    async def _read_version(self, policy: Policy, version: int) -> PolicyVersion:
        found = None
        with contextlib.suppress(NotFound):
            found = await self._database.fetch(versions.get_version, version)
        if found is None or found.policy_id != policy.policy_id:
            raise NotFound(f"policy {policy.name!r} has no version {version}", param="model", code="model_not_found")
        if found.status is PolicyStatus.FAILED:
            raise Conflict(f"version {version} failed: {found.error}", param="model", code="version_not_loaded")
        return found

    def _stands_for_policy(self, name: str) -> bool:
        if is_adapter_name(name) or len(name) > MAX_NAME_LENGTH:
            return False
        return next(
            (rule == "policy" for pattern, rule in self._name_rules.items() if fnmatchcase(name, pattern)), False
        )

    def listed(self, models: list[Json]) -> list[Json]:
        """Return the models to list: the engine's own, and every name that a rule accepts literally."""
        own = [model for model in models if not is_adapter_name(str(model["id"]))][:1]
        known = {model["id"] for model in own}
        names = [pattern for pattern in self._name_rules if pattern not in known and not set(pattern) & set("*?[")]
        return own + [{**model, "id": name} for model in own for name in names if self._stands_for_policy(name)]

    def route(self, key: str) -> Engine:
        """Return the serving engine of a key, such as an API key's id.

        Raises:
            EngineUnavailable: when none serves.
        """
        return self._choose(key, self.serving)

    def version_on(self, engine: Engine) -> int:
        """Return the version that the default policy's calls sample with on an engine."""
        return engine.lane_of(self.state(DEFAULT_POLICY).active or OWN_MODEL).version

    def lane(self, session: Session, wanted: PolicyVersion | None = None) -> Lane:
        """Return what the session's calls sample with now; its engine may not have that adapter yet.

        Args:
            session: the calls' session.
            wanted: the version that a call asks for; None for the one that is served to its session.

        Raises:
            EngineUnavailable: when no engine serves.
            Conflict: when no engine has the whole weights that are wanted, or the policy is archived.
        """
        if session.policy_id in self.archived:
            self.check_in_use(session.policy_id)
        state = self.state(session.policy_id)
        served = state.served or OWN_MODEL
        arm = None if session.arm is None else state.of_arm(session.arm)
        version = wanted or arm or served
        engines = self._not_draining
        if version.kind is PolicyKind.LORA:
            fit = [engine for engine in engines if not engine.base_lane.version]
        elif wanted or arm:
            fit = [engine for engine in engines if engine.base_lane.version == version.version]
        else:
            arms = {each.version for each in (state.canary, state.holdout) if each is not None}
            fit = [engine for engine in engines if engine.base_lane.version not in arms]
        if not fit:
            if wanted and engines:
                raise Conflict(
                    f"version {wanted.version} needs whole weights that no engine has now: ask for another version, "
                    "or for the served one",
                    param="model",
                    code="version_not_loaded",
                )
            # Where one arm has no engine left, its sessions are better served by the other than not at all.
            version, fit = served, engines
        return self._choose(session.session_id, fit).lane_of(version)

    def _choose(self, key: str, engines: list[Engine]) -> Engine:
        if not engines:
            raise EngineUnavailable(
                f"none of the {len(self.engines)} engines is ready; check /readyz and the engine's log, then retry"
            )
        if len(engines) == 1:
            return engines[0]
        return max(engines, key=lambda engine: blake2b(f"{engine.url} {key}".encode(), digest_size=8).digest())

    async def drain(self, engine: Engine, seconds: float) -> None:
        """Send new calls to other engines, and wait so long for the running ones to end."""
        if not engine.is_serving:
            return
        engine.change(EngineState.DRAINING)
        engine.draining_since = time.monotonic()
        deadline = time.monotonic() + seconds
        while engine.num_calls and time.monotonic() < deadline:  # noqa: ASYNC110  once in a trial
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    def stop_draining(self, *, before: float = math.inf) -> None:
        """Send new calls to every serving engine again whose draining began before this monotonic instant."""
        for engine in self.serving:
            if engine.state is EngineState.DRAINING and engine.draining_since < before:
                engine.change(EngineState.READY)

    def engine_at(self, url: str) -> Engine | None:
        """Return the engine with this address; None if there is none."""
        return next((engine for engine in self.engines if engine.url == url), None)

    def note_label(self, url: str, label: str) -> None:
        """Note that an engine's base weights, which another process has loaded, have this label."""
        self._num_notes += 1  # the next call reads whether they are on trial
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
        return any(engine.state is EngineState.ABSENT for engine in self.engines)

    async def admit(self, session: Session, version: PolicyVersion | None = None, *, has_waited: bool = False) -> Lane:
        """Wait for an engine, and return the lane that the call takes.

        The caller gives the lane to `release` exactly once.

        Args:
            session: the call's session.
            version: the version that the call asks for; None for the one that is served to its session's policy.
            has_waited: whether the call has waited for an engine already, so that it waits no longer.

        Raises:
            Conflict: no engine has the whole weights that the call asks for, or the policy is archived.
            ReloadFailed: the engine did not load the adapter.
            EngineUnavailable: no engine serves, and none came back in time.
            StoreError: a trial runs, and the store does not say whether it still does.
        """
        # Another process may have started or ended a trial: without a reading, a session could enter it after it has
        # left it, or a call outside the trial could sample with the version on trial.
        num_notes, is_trying = self._num_notes, self.state(session.policy_id).canary is not None
        self._in_flight += 1
        try:
            if is_trying or session.arm is not None or self._num_noted < num_notes:
                await self.refresh()
                self._num_noted = max(self._num_noted, num_notes)
            lane = await self._wait_for_lane(session, version, may_wait=not has_waited)
        except BaseException:
            self._in_flight -= 1
            raise
        lane.num_calls += 1
        lane.engine.num_started += 1
        state = self.state(session.policy_id)
        if version is None and (state.canary is not None or state.holdout is not None):
            sampled = state.of_arm(lane.version)
            arm = "control" if sampled is None else "canary" if sampled is state.canary else "holdout"
            self._metrics.canary_calls.labels(arm).inc()
        return lane

    async def served_lane(self, session: Session) -> Lane:
        """Return what the session's policy is served with, apart from canary and hold-out.

        Raises:
            ReloadFailed: the engine did not load the adapter.
            EngineUnavailable: no engine serves.
        """
        return await self._loaded(self.lane(dataclasses.replace(session, arm=None)))

    async def _loaded(self, lane: Lane) -> Lane:
        """Return the lane of an adapter once its engine has it."""
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
        lane.adapter = (await self._loaded(lane)).adapter
        lane.engine.adapters[lane.version] = lane  # which counts the calls that run

    async def _wait_for_lane(self, session: Session, wanted: PolicyVersion | None, *, may_wait: bool) -> Lane:
        """Return the session's lane once its engine takes calls; a reload has a deadline of its own."""
        while True:
            try:
                lane = self.lane(session, wanted)
            except EngineUnavailable:
                if not (may_wait and await self.wait_for_first()):
                    raise
                continue
            if lane.engine.state is not EngineState.RELOADING:
                return lane if lane.adapter is None else await self._loaded(lane)
            await self._changed.wait()

    def release(self, lane: Lane) -> None:
        lane.num_calls -= 1
        self._in_flight -= 1

    async def close(self) -> None:
        for engine in self.engines:
            await engine.close()


def _num_calls(engine: Engine) -> int:
    return engine.num_calls


def _read(connection: Connection) -> tuple[dict[int, serving.ServingState], list[Policy]]:
    return serving.serving_states(connection), policies.list_policies(connection)
