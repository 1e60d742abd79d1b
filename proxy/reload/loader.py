"""Loads one version into one engine, compares its logprobs with the trainer's, and restores the last good version.

The engine is paused in keep mode: running calls continue under the new weights, and new calls wait in the proxy. The
weights always carry a label. During an exchange the label names no version, so a process that finds such an engine
after a crash loads a version again. Adapters need no pause: each has its own name, with a digest of its files. An
engine that was restarted loads an adapter at the first call that needs it. Engines read a version's directory, unless
a feature brings them its weights in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from proxy.engines.engine import LOADING, UNLABELLED, Engine, Lane
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.reload.checkpoint import adapter_digest, check_version, moves_model
from proxy.reload.lease import DriverLease
from proxy.reload.version_files import PATIENCE_SECONDS, VersionFiles
from proxy.settings import ProxySettings
from turnwise.adapter_names import adapter_name, own_version
from turnwise.errors import BadCheckpoint, EngineError, EngineUnavailable, FilesNotRead, ReloadFailed, StoreError
from turnwise.store import versions
from turnwise.store.database import Database
from turnwise.types import PolicyKind, PolicyVersion
from turnwise.version_directory import ENGINE_ANSWER, Probe, read_probe

log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Engines that load weights at the same time: what they read them from has a limit too."""
NUM_PROBED = 16
PROBED_TEXT = [{"role": "user", "content": "Name a river, a hill, two colours and the numbers from one to eight. " * 2}]
"""What is computed with and without an adapter that somebody brought: it has no probe of a trainer's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """How far an engine's logprobs are from a probe, or may be, nats."""

    mean: float
    largest: float

    def is_within(self, limit: Gap) -> bool:
        return self.mean <= limit.mean and self.largest <= limit.largest


@dataclasses.dataclass(frozen=True, slots=True)
class GapLimits:
    """The limits for one pair of precisions."""

    least: Gap
    """However near engine and trainer were at version 0: another text may differ more."""
    unmeasured: Gap
    """Where version 0 was not compared."""
    most: Gap
    """However far they were apart."""


FLOAT32 = "float32"
FACTOR = 5.0
"""How many times the difference at version 0 is within the limits."""
COARSE_ENGINE = GapLimits(Gap(0.05, 0.25), Gap(0.05, 0.25), Gap(0.1, 1.0))
"""Where the probe is in float32, and the engine is not or does not say."""
COARSE_PROBE = GapLimits(Gap(0.1, 1.0), Gap(0.1, 1.0), Gap(0.2, 2.0))
BOTH_FLOAT32 = GapLimits(Gap(5e-5, 5e-4), Gap(5e-4, 5e-3), COARSE_ENGINE.least)
"""Where trainer and engine compute in float32: they differ by 3e-6 on average, and by 5e-5 at most."""


def gap_to(probe: Probe, logprobs: Mapping[int, float]) -> Gap:
    gaps = [abs(logprob - probe.logprobs[at - 1]) for at, logprob in logprobs.items()]
    return Gap(sum(gaps) / len(gaps), max(gaps))


def limit_of(probe: Probe, engine_dtype: str | None, at_base: Gap | None) -> Gap:
    """Return how far an engine with weights of this number format may be from a probe.

    `at_base` is how far it was from the probe of version 0; None if that was not compared.
    """
    limits = COARSE_PROBE
    if probe.dtype == FLOAT32:
        limits = BOTH_FLOAT32 if engine_dtype == FLOAT32 else COARSE_ENGINE
    if at_base is None:
        return limits.unmeasured
    return Gap(
        min(max(FACTOR * at_base.mean, limits.least.mean), limits.most.mean),
        min(max(FACTOR * at_base.largest, limits.least.largest), limits.most.largest),
    )


def mismatch(
    probe: Probe,
    found: Gap,
    *,
    engine_dtype: str | None,
    at_base: Gap | None,
    tolerance: float | None,
) -> str | None:
    """Return in what an engine differs from a probe; None if it is within the limits.

    `found` is how far the engine is from it, and `tolerance` the largest difference, in place of the limits by
    precision; the others are as in `limit_of`.
    """
    limit = limit_of(probe, engine_dtype, at_base) if tolerance is None else Gap(tolerance, tolerance)
    if found.is_within(limit):
        return None
    before = "" if at_base is None else f", which at version 0 was {at_base.mean:.3g} and {at_base.largest:.3g}"
    return (
        f"the engine's logprobs are {found.mean:.3g} nats from the checkpoint's own probe on average and "
        f"{found.largest:.3g} at most{before}; the limits for {probe.dtype} on an engine in "
        f"{engine_dtype or 'an unknown format'} are {limit.mean:g} and {limit.largest:g} (--probe-tolerance). The "
        "engine does not compute what was published: most often a part of the model kept its old weights, such as an "
        "output head that is tied to the embeddings; on a CPU, start vLLM with Turnwise's plug-in. `turnwise verify "
        "--forward` names the part"
    )


class Source(NamedTuple):
    """Whole weights that were brought to an engine, which uses them in the place of the version's directory."""

    probe: Probe | None
    load: Callable[..., Awaitable[None]]
    """Replaces the engine's base weights with them; takes the longest time as `seconds`."""


class Loader:
    """Brings engines to versions; a feature that brings weights in another way than by a directory extends it."""

    def __init__(
        self,
        database: Database,
        settings: ProxySettings,
        metrics: Metrics,
        faults: FaultPoints,
        lease: DriverLease,
        announce: Callable[[Engine], Awaitable[None]],
        files: VersionFiles,
    ) -> None:
        self._database = database
        self._settings = settings
        self._metrics = metrics
        self._announce = announce
        """Tells the proxy's other workers what an engine has loaded, before it samples with it."""
        self._faults = faults
        self._lease = lease
        self.files = files
        self.database_id = ""
        """The database's own id, which is in the names of its adapters; the reloader reads it at the start."""
        self._at_once = asyncio.Semaphore(MOST_AT_ONCE)
        self._loading: dict[tuple[str, int], asyncio.Task[Lane]] = {}
        self._at_base: dict[str, Gap] = {}
        """How far each engine was from the trainer at version 0, by URL."""

    async def check(self, version: PolicyVersion, engine: Engine) -> None:
        """Check a version's whole directory before any engine loads it.

        Raises:
            BadCheckpoint: naming what is wrong.
            FilesNotRead: its files are being read; call again.
        """
        if not is_own_model(version, engine):
            await self.check_directory(version, engine)

    async def check_directory(self, version: PolicyVersion, engine: Engine) -> None:
        if not version.is_written:
            raise FilesNotRead(f"version {version.version} is not on disk yet, and its trainer does not hand it out")
        path, model_path = version.path, engine.model_path
        check = functools.partial(check_version, path, version.kind, model_path)
        await self.files.read(("check", path, str(model_path)), path, check, seconds=PATIENCE_SECONDS)

    async def exchange(self, engine: Engine, target: PolicyVersion, last_good: PolicyVersion | None) -> float:
        """Load the target, or on failure the last good version; return how long the engine was paused, seconds.

        An adapter is loaded beside what the engine serves, without a pause, if that is the model under the adapter.

        Raises:
            EngineError: the target is not served. An engine that cannot restore the last good version is taken out.
            FilesNotRead: the same, but its files are being read; call again.
        """
        if target.kind is PolicyKind.LORA and engine.has_own_model:
            return await self.load(engine, target)
        async with self._at_once:
            source = await self.bring(engine, target)
            with engine.reloading():
                try:
                    return await self.load(engine, target, source)
                except (EngineError, FilesNotRead) as error:
                    await self._restore_last_good(engine, last_good, error)
                    raise

    async def bring(self, engine: Engine, version: PolicyVersion) -> Source | None:  # noqa: ARG002
        """Bring whole weights to an engine while it serves calls as before; None leaves it to read their directory.

        Raises:
            BadCheckpoint: there is no directory to load them from.
            FilesNotRead: its directory is being read; call again.
        """
        return None

    def appeared(self, engine: Engine) -> None:
        """Take an engine that answers again, and may have been restarted with other flags."""

    async def restore(self, engine: Engine, version: PolicyVersion) -> None:
        """Load a version whatever the engine has loaded, and resume sampling: the driver may have died.

        Raises:
            EngineError, BadCheckpoint: it is not loaded.
            FilesNotRead: its files are being read; call again.
        """
        async with self._at_once:
            await self.check(version, engine)
            await self.load(engine, version, await self.bring(engine, version))
            await engine.resume()

    async def load(self, engine: Engine, version: PolicyVersion, source: Source | None = None) -> float:
        """Load a version, which was brought to the engine or which it reads; return how long it was paused, seconds.

        An adapter is loaded beside what the engine serves, which changes only if that is not the model under it. If the
        check of whole weights fails, their label is removed: otherwise the engine would be admitted again with them.

        Raises:
            EngineError: it is not known what the engine serves now.
            FilesNotRead: the same, but a file of the version was not read in time.
        """
        try:
            return await self._load_in_time(engine, version, source)
        except EngineError:
            with contextlib.suppress(EngineError):
                if version.kind is PolicyKind.FULL and engine.loaded_version == version.version:
                    await engine.label_weights(LOADING)
            raise

    async def _load_in_time(self, engine: Engine, version: PolicyVersion, source: Source | None) -> float:
        seconds = self._settings.reload_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                if version.kind is PolicyKind.LORA:
                    return await self._load_adapter(engine, version)
                return await self._load_weights(engine, version, source)
        except TimeoutError as error:
            if self.files.is_reading(version.path):
                raise FilesNotRead(f"a file in {version.path!r} was not read within {seconds:g} s") from error
            raise ReloadFailed(
                f"the engine at {engine.url} did not load version {version.version} within {seconds:g} s "
                "(--reload-timeout-seconds)"
            ) from error

    async def _load_weights(self, engine: Engine, version: PolicyVersion, source: Source | None) -> float:
        if has_loaded(engine, version):
            return 0.0
        probe = source.probe if source else await self.probe(version, engine, seconds=None)
        await self._compare_base(engine, probe)
        paused = await self._replace_weights(engine, version, source)
        await self.verify(engine.base_lane, probe)
        return paused

    async def _load_adapter(self, engine: Engine, version: PolicyVersion) -> float:
        name, probe = await self._name_of(version), await self.probe(version, engine)
        paused = 0.0 if engine.has_own_model else await self._replace_weights(engine, engine.own_model, None)
        await self._place_adapter(engine, version, name, probe)
        return paused

    async def _name_of(self, version: PolicyVersion, *, seconds: float | None = PATIENCE_SECONDS) -> str:
        path = version.path
        read = functools.partial(adapter_digest, path)
        digest = await self.files.read(("digest", path), path, read, seconds=seconds)
        return adapter_name(version.version, self.database_id, digest)

    async def _place_adapter(self, engine: Engine, version: PolicyVersion, name: str, probe: Probe | None) -> Lane:
        """Load an adapter; calls get it after its probe agrees, and the engine does not keep one that fails it."""
        await self._compare_base(engine, probe)
        await engine.load_adapter(name, version.path, seconds=self._settings.reload_timeout_seconds)
        try:
            await self.verify(Lane(engine, version.version, name), probe)
            if probe is None:
                await self._check_moved(Lane(engine, version.version, name), version)
        except EngineError:
            with contextlib.suppress(EngineError):
                await engine.unload_adapter(name)
            raise
        return engine.take_adapter(version.version, name)

    async def adopt(self, engine: Engine, version: PolicyVersion) -> None:
        """Let calls sample with an adapter that an engine has from before, if it has the version's files of now.

        Raises:
            BadCheckpoint: the files cannot be read.
            FilesNotRead: they are being read; call again.
        """
        name = await self._name_of(version)
        if name in engine.adapter_names:
            engine.take_adapter(version.version, name)

    def own_adapters(self, engine: Engine) -> list[tuple[str, int]]:
        """Return the names and versions of this database's adapters on an engine, in the order of loading."""
        found = [(name, own_version(name, self.database_id)) for name in engine.adapter_names]
        return [(name, version) for name, version in found if version is not None]

    async def _replace_weights(self, engine: Engine, version: PolicyVersion, source: Source | None) -> float:
        seconds, started = self._settings.reload_timeout_seconds, time.perf_counter()
        await engine.pause()
        await engine.label_weights(LOADING)
        load = functools.partial(engine.load_weights, weights_path(version, engine)) if source is None else source.load
        await load(seconds=seconds)
        self._faults.point("mid_reload")
        await engine.label_weights(version.version)
        await self._announce(engine)
        await engine.resume()
        return time.perf_counter() - started

    async def probe(
        self,
        version: PolicyVersion,
        engine: Engine,  # noqa: ARG002  for subclasses
        *,
        seconds: float | None = PATIENCE_SECONDS,
    ) -> Probe | None:
        """Return a version's text with its logprobs; None without one.

        Raises:
            FilesNotRead: it was not read in this number of seconds; call again.
        """
        path = version.path
        read = functools.partial(read_probe, Path(path))
        return await self.files.read(("probe", path), path, read, seconds=seconds)

    async def verify(self, lane: Lane, probe: Probe | None) -> None:
        if probe is None:
            return
        found = await self.probed(lane, probe)
        problem = mismatch(
            probe,
            gap_to(probe, found),
            engine_dtype=lane.engine.dtype,
            at_base=self._at_base.get(lane.engine.url),
            tolerance=self._settings.probe_tolerance,
        )
        if problem is not None:
            evidence = {ENGINE_ANSWER: {"positions": list(found), "logprobs": list(found.values())}}
            raise ReloadFailed(problem, evidence=evidence)

    async def _check_moved(self, lane: Lane, version: PolicyVersion) -> None:
        """Compare an adapter without a probe with the model under it: an engine that skips its tensors serves that."""
        path, engine = version.path, lane.engine
        seconds = self._settings.reload_timeout_seconds
        if not await self.files.read(("moves", path), path, functools.partial(moves_model, path), seconds=seconds):
            return
        text = Probe(await engine.tokenise({"model": engine.model, "messages": PROBED_TEXT}), [])
        if await self.probed(lane, text) == await self.probed(engine.base_lane, text):
            raise ReloadFailed(
                f"the engine at {engine.url} gives the same logprobs with the adapter {path!r} of version "
                f"{version.version} as without: it does not apply it. Compare the names of its tensors with those of "
                "the served model, and the engine's log on debug level"
            )

    async def _compare_base(self, engine: Engine, probe: Probe | None) -> None:
        """Measure once what an engine and the trainer differ by at version 0, while the engine has its own model."""
        base = None if probe is None else probe.base
        if base is None or engine.url in self._at_base or not engine.has_own_model:
            return
        found = self._at_base[engine.url] = gap_to(base, await self.probed(engine.base_lane, base))
        log.info(
            "the engine at %s and the trainer differ by %.3g nats on average and %.3g at most at version 0",
            engine.url,
            found.mean,
            found.largest,
        )

    async def probed(self, lane: Lane, probe: Probe) -> dict[int, float]:
        positions = probe.positions(NUM_PROBED)
        logprobs = await lane.engine.token_logprobs(lane.model, probe.token_ids, positions)
        return dict(zip(positions, logprobs, strict=True))

    async def _restore_last_good(self, engine: Engine, last_good: PolicyVersion | None, cause: Exception) -> None:
        """Load the last good version before new calls are admitted."""
        if last_good is None:
            engine.take_out(cause)
            return
        try:
            if isinstance(cause, EngineUnavailable):
                await engine.ask("GET", "/health", seconds=5.0)
            await self.load(engine, last_good, await self.bring(engine, last_good))
            await engine.resume()
        except (BadCheckpoint, EngineError, FilesNotRead, StoreError) as error:
            engine.take_out(error)

    async def load_at_call(self, engine: Engine, version: int) -> Lane:
        """Return the lane of an adapter; load it if the engine lacks it. Calls at the same time share one load."""
        key = engine.url, version
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load_missing(engine, version))
            task.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(task)

    async def _load_missing(self, engine: Engine, version: int) -> Lane:
        adapter = await self._database.fetch(versions.get_version, version)
        seconds = self._settings.reload_timeout_seconds
        try:
            name = await self._name_of(adapter, seconds=seconds)
            probe = await self.probe(adapter, engine, seconds=seconds)
        except BadCheckpoint as error:
            raise ReloadFailed(f"the adapter of version {version} cannot be loaded: {error}") from error
        await engine.fetch_models()
        if name in engine.adapter_names:  # another process has loaded it
            return engine.take_adapter(version, name)
        self._metrics.adapter_loads.inc()
        return await self._place_adapter(engine, adapter, name, probe)


def is_own_model(version: PolicyVersion, engine: Engine) -> bool:
    """Return whether a version is the model that the engine was started with.

    Only version 0 can be. If the engine's files are not on this machine, it is one that was published with a digest.
    """
    if version.version != 0 or version.kind is not PolicyKind.FULL:
        return False
    own = engine.own_model
    is_same = version.model_digest is not None and own.model_digest in (None, version.model_digest)
    return is_same or version.path in (engine.model_path, own.path)


def weights_path(version: PolicyVersion, engine: Engine) -> str:
    return engine.model_path if is_own_model(version, engine) else version.path


def has_loaded(engine: Engine, version: PolicyVersion) -> bool:
    loaded = engine.loaded_version
    return loaded == version.version or (loaded == UNLABELLED and is_own_model(version, engine))


def serves(engine: Engine, version: PolicyVersion) -> bool:
    if version.kind is PolicyKind.LORA:
        return engine.has_own_model and version.version in engine.adapters
    return has_loaded(engine, version)
