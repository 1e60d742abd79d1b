"""Loads one version into one engine, and restores the last good version where that fails.

The engine is paused in keep mode: running calls continue under the new weights, and new calls wait in the proxy. The
weights always carry a label. During an exchange the label names no version, so a process that finds such an engine
after a crash loads a version again. Adapters need no pause: each has its own name, with a digest of its files. An
engine that was restarted loads an adapter at the first call that needs it. Engines read a version's directory, unless
a feature brings them its weights in another way.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from proxy.engines.engine import LOADING, UNLABELLED, Engine, Lane
from proxy.fault import FaultPoints
from proxy.metrics import Metrics
from proxy.reload.checkpoint import adapter_digest, check_version
from proxy.reload.lease import DriverLease
from proxy.reload.version_files import PATIENCE_SECONDS, VersionFiles
from proxy.settings import ProxySettings
from turnwise.adapter_names import adapter_name, own_version
from turnwise.errors import BadCheckpoint, EngineError, EngineUnavailable, FilesNotRead, ReloadFailed, StoreError
from turnwise.store import versions
from turnwise.store.database import Database
from turnwise.types import PolicyKind, PolicyVersion
from turnwise.version_directory import Probe

log = logging.getLogger(__name__)

MOST_AT_ONCE = 64
"""Engines that load weights at the same time: what they read them from has a limit too."""


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
        await self.compare_base(engine, probe)
        paused = await self._replace_weights(engine, version, source)
        await self.verify(engine.base_lane, version, probe)
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
        await self.compare_base(engine, probe)
        await engine.load_adapter(name, version.path, seconds=self._settings.reload_timeout_seconds)
        try:
            await self.verify(Lane(engine, version.version, name), version, probe)
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
        version: PolicyVersion,  # noqa: ARG002  for subclasses
        engine: Engine,  # noqa: ARG002
        *,
        seconds: float | None = PATIENCE_SECONDS,  # noqa: ARG002
    ) -> Probe | None:
        """Return what an engine must compute with a version; None where that is not compared.

        Raises:
            FilesNotRead: it was not read in this number of seconds; call again.
        """
        return None

    async def compare_base(self, engine: Engine, probe: Probe | None) -> None:
        """Take an engine that is about to load what the probe is of."""

    async def verify(self, lane: Lane, version: PolicyVersion, probe: Probe | None) -> None:
        """Check what an engine computes with a version that it has loaded.

        Raises:
            ReloadFailed: it is not what was published.
        """

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
