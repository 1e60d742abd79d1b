"""All engines: which one a session's calls go to, how many calls run at once, and how long a call waits for an engine.

A session goes to the same serving engine each time, by rendezvous hashing of its id, so that its prefix cache is warm
and the loss of an engine moves only that engine's sessions. While an engine's weights are exchanged its new calls wait
here; while no engine serves but one is expected back, all new calls wait for up to `engine_wait_seconds`.
"""

from __future__ import annotations

import asyncio
import functools
from hashlib import blake2b
from typing import Protocol

from proxy.engines.engine import Engine, Lane
from proxy.engines.http_client import Access
from proxy.engines.state import EngineState
from proxy.metrics import Metrics
from turnwise.errors import EngineUnavailable, Overloaded
from turnwise.types import Session


class Arm(Protocol):
    """A version under trial, and the sessions that sample with it."""

    @property
    def version(self) -> int:
        """The version."""

    def takes(self, session: Session) -> bool:
        """Return whether the session belongs to the trial."""


class EnginePool:
    """Routes calls to engines and limits how many run at once."""

    def __init__(
        self,
        urls: list[str],
        metrics: Metrics,
        *,
        timeout_seconds: float,
        max_concurrent_calls: int,
        wait_seconds: float = 0.0,
        gone_seconds: float = 30.0,
        access: Access | None = None,
    ) -> None:
        self.engines = [
            Engine(url, timeout_seconds=timeout_seconds, gone_seconds=gone_seconds, access=access) for url in urls
        ]
        self.trial: Arm | None = None
        """The running canary: the version that only its share of the sessions samples with."""
        self._metrics = metrics
        self._max_concurrent_calls = max_concurrent_calls
        self._wait_seconds = wait_seconds
        self._in_flight = 0
        self._changed = asyncio.Event()
        metrics.compute(metrics.in_flight, lambda: self._in_flight)
        for engine in self.engines:
            engine.status.on_change = lambda _state, engine=engine: self._note_change(engine)
            metrics.engine_up.labels(engine.url).set(0)
            engine.wait_until_serving = functools.partial(self._wait_until_serving, engine)
            engine.observe_head = metrics.engine_seconds.labels(engine.url).observe
            metrics.compute(metrics.engine_calls.labels(engine.url), functools.partial(_num_calls, engine))

    def _note_change(self, engine: Engine) -> None:
        """Export an engine's new state, and wake the calls that wait for one."""
        self._metrics.engine_up.labels(engine.url).set(engine.is_serving)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def num_calls(self) -> int:
        """Calls that wait for an engine or run on one."""
        return self._in_flight

    @property
    def serving(self) -> list[Engine]:
        """Engines that calls are routed to."""
        return [engine for engine in self.engines if engine.is_serving]

    def route(self, key: str) -> Engine:
        """Return the serving engine of a key, such as an API key's id.

        Raises:
            EngineUnavailable: when none serves.
        """
        return self._choose(key, [engine.active_lane for engine in self.serving]).engine

    def lane(self, session: Session) -> Lane:
        """Return what the session's calls sample with now.

        Raises:
            EngineUnavailable: when no engine serves.
        """
        serving, trial = self.serving, self.trial
        serving = [engine for engine in serving if engine.state is not EngineState.DRAINING] or serving
        lanes = [engine.active_lane for engine in serving]
        if trial is not None:
            tried = [lane for lane in lanes if lane.version == trial.version]
            tried = tried or [engine.adapters[trial.version] for engine in serving if trial.version in engine.adapters]
            control = [lane for lane in lanes if lane.version != trial.version]
            # Where one arm has no engine left, its sessions are better served by the other than not at all.
            lanes = (tried if trial.takes(session) else control) or lanes
        return self._choose(session.session_id, lanes)

    def _choose(self, key: str, lanes: list[Lane]) -> Lane:
        if not lanes:
            raise EngineUnavailable(
                f"none of the {len(self.engines)} engines is ready; check /readyz and the engine's log, then retry"
            )
        if len(lanes) == 1:
            return lanes[0]
        return max(lanes, key=lambda lane: blake2b(f"{lane.engine.url} {key}".encode(), digest_size=8).digest())

    def stop_draining(self) -> None:
        """Send new calls to every serving engine again."""
        for engine in self.serving:
            if engine.state is EngineState.DRAINING:
                engine.status.change(EngineState.READY)

    def note_label(self, url: str, label: str) -> None:
        """Note that an engine's base weights, which another process has loaded, have this label."""
        for engine in self.engines:
            if engine.url == url:
                engine.apply_label(label)
                engine.active_lane = engine.base_lane

    async def wait_for_first(self) -> bool:
        """Wait while no engine serves and one is expected; return whether one serves now."""
        if self.serving:
            return True
        give_up_at = asyncio.get_running_loop().time() + self._wait_seconds
        try:
            async with asyncio.timeout_at(give_up_at):
                while not self.serving and self._is_one_expected():
                    await self._changed.wait()
        except TimeoutError:
            return False
        return bool(self.serving)

    def _is_one_expected(self) -> bool:
        """Return whether an engine may come back; one that is unsuitable does not."""
        return any(engine.state is EngineState.ABSENT for engine in self.engines)

    async def admit(self, session: Session, *, has_waited: bool = False) -> Lane:
        """Take one of the places for concurrent calls, wait for an engine, and return the lane that the call takes.

        The caller gives the lane to `release` exactly once.

        Args:
            session: the call's session.
            has_waited: whether the call has waited for an engine already, so that it waits no longer.

        Raises:
            Overloaded: all places are taken.
            EngineUnavailable: no engine serves, and none came back in time.
        """
        if self._in_flight >= self._max_concurrent_calls:
            raise Overloaded(f"{self._in_flight} calls are in flight, which is the limit; retry after a second")
        self._in_flight += 1
        try:
            lane = await self._wait_for_lane(session, 0.0 if has_waited else self._wait_seconds)
        except BaseException:
            self._in_flight -= 1
            raise
        lane.num_calls += 1
        lane.engine.num_started += 1
        if self.trial is not None:
            arm = "canary" if lane.version == self.trial.version else "control"
            self._metrics.canary_calls.labels(arm).inc()
        return lane

    async def _wait_for_lane(self, session: Session, wait_seconds: float) -> Lane:
        """Return the session's lane once its engine takes calls."""
        give_up_at: float | None = None
        while True:
            changed = self._changed
            try:
                lane = self.lane(session)
            except EngineUnavailable:
                if not self._is_one_expected():
                    raise
                now = asyncio.get_running_loop().time()
                give_up_at = give_up_at or now + wait_seconds
                if now >= give_up_at:
                    raise
            else:
                if lane.engine.state is not EngineState.RELOADING:
                    return lane
                give_up_at = None  # a reload has a deadline of its own
            try:
                async with asyncio.timeout_at(give_up_at):
                    await changed.wait()
            except TimeoutError:
                continue

    async def _wait_until_serving(self, engine: Engine) -> bool:
        """Wait for an absent engine; while others serve, its call fails at once and can be retried there."""
        give_up_at = asyncio.get_running_loop().time() + self._wait_seconds
        try:
            async with asyncio.timeout_at(give_up_at):
                while not self.serving or engine.state is EngineState.RELOADING:
                    await self._changed.wait()
        except TimeoutError:
            return False
        return engine.is_serving

    def release(self, lane: Lane) -> None:
        """Return the place of a call."""
        lane.num_calls -= 1
        self._in_flight -= 1

    def close(self) -> None:
        """Close all idle connections."""
        for engine in self.engines:
            engine.close()


def _num_calls(engine: Engine) -> int:
    return engine.num_calls
