"""Versions from the trainer's memory: asked for at the trainer, received by an engine while calls go on.

The ledger names the trainers. A version that no trainer holds, or that does not arrive, is loaded from its directory,
so a failure here is no failure of the reload.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable

from proxy.engines.engine import Engine
from proxy.metrics import Metrics
from proxy.reload import staged_transfer
from proxy.reload.staged_transfer import StagedVersion
from proxy.reload.trainer_http import ANSWER_SECONDS, CONNECT_SECONDS, ask_trainer
from turnwise.errors import EngineError, EngineRefused, StoreError
from turnwise.store import weight_servers
from turnwise.store.database import Database
from turnwise.types import Json, PolicyKind, PolicyVersion
from turnwise.version_directory import Probe, probe_from

log = logging.getLogger(__name__)

REFUSED_SECONDS = 60.0
"""How long an engine that refused a transfer gets its versions from directories without being asked again."""
STAGED_BACKENDS = ("nccl", "ipc")
"""vLLM's own backends that receive whole versions while the engine is paused."""
NOT_CONFIGURED = "Weight transfer not configured"
"""What vLLM answers without the plugin."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A version that a trainer holds in memory."""

    version: int
    url: str
    """Address of the trainer's weights."""
    probe: Probe | None
    staged: StagedVersion | None = None
    """Where it waits for an engine that receives while it is paused; None for engines that receive beforehand."""


@dataclasses.dataclass(frozen=True, slots=True)
class SleepWish:
    """A trainer's request that engines give up their memory."""

    url: str
    """Address of the trainer's weights."""
    level: int
    """1 or 2, as in vLLM."""


class Transfers:
    """Asks trainers for versions, and engines to receive them."""

    def __init__(self, database: Database, metrics: Metrics, *, seconds: float) -> None:
        self._database = database
        self._metrics = metrics
        self._seconds = seconds
        self._refused_at: dict[str, float] = {}
        """Engines that refused a transfer which they may take later, by URL, and when they refused."""
        self._held: dict[str, int] = {}
        """The version that each engine received last, by URL: what the next one may be a delta of."""

    async def offer(self, policy: PolicyVersion, engine: Engine) -> Offer | None:
        """Return where a version can be had for an engine; None if only from its directory."""
        if policy.kind is not PolicyKind.FULL or self._has_refused(engine):
            return None
        answer = await self._first_answer(f"/versions/{policy.version}", ANSWER_SECONDS, lambda _: True)
        if answer is None:
            return None
        url, found = answer
        return Offer(policy.version, url, probe_from(found.get("probe")))

    async def wanted_sleep(self) -> SleepWish | None:
        """Return a trainer's request that engines sleep; None where no trainer that answers has one."""
        answer = await self._first_answer("/engines", CONNECT_SECONDS, lambda found: bool(found.get("sleep_level")))
        if answer is None:
            return None
        url, found = answer
        return SleepWish(url, int(found["sleep_level"]))

    async def confirm_sleep(self, wish: SleepWish) -> None:
        """Tell the trainer that engines sleep."""
        await ask_trainer(wish.url, "POST", "/engines", {"sleeping": True}, CONNECT_SECONDS)

    async def send(self, offer: Offer, engine: Engine) -> Offer | None:
        """Let an engine receive a version, or prepare that; what the engine serves does not change.

        Returns:
            What can be loaded now; None if the version has to be read from its directory.
        """
        try:
            async with asyncio.timeout(self._seconds):
                found = await self._send(offer, engine)
        except TimeoutError:
            found = f"it took over {self._seconds:g} s (--reload-timeout-seconds)"
        except EngineError as error:
            found = str(error)
            if _lacks_transfers(error):
                engine.transfers.is_unsupported = True
                log.warning(
                    "the engine at %s was started without weight transfers, so it reads versions from their "
                    "directories until it is restarted; start it with `turnwise engine` to send them from memory",
                    engine.url,
                )
                return None
            self._refused_at[engine.url] = time.monotonic()
        if isinstance(found, str):
            self._note_failure(offer, engine, found)
            return None
        if found.staged is None:
            self._held[engine.url] = offer.version
            self._metrics.weight_transfers.labels("sent").inc()
        return found

    async def load_staged(self, offer: Offer, engine: Engine) -> bool:
        """Load a version that was prepared into a paused engine; return whether it has all of it.

        Raises:
            EngineError: it is not known what the engine has loaded.
        """
        assert offer.staged is not None
        reason = await staged_transfer.load(offer.staged, engine, self._seconds)
        if reason is not None:
            self._note_failure(offer, engine, reason)
            return False
        self._metrics.weight_transfers.labels("sent").inc()
        return True

    def _note_failure(self, offer: Offer, engine: Engine, reason: str) -> None:
        self._held.pop(engine.url, None)
        self._metrics.weight_transfers.labels("failed").inc()
        log.warning(
            "version %d was not sent to the engine at %s, its directory is used: %s", offer.version, engine.url, reason
        )

    async def _send(self, offer: Offer, engine: Engine) -> Offer | str:
        """Return what the engine can load now, or why it received nothing.

        Raises:
            EngineError: the engine takes no transfers.
        """
        num_workers = await engine.transfers.num_workers()
        if await engine.transfers.find_backend(seconds=self._seconds) in STAGED_BACKENDS:
            staged = await staged_transfer.prepare(offer.url, offer.version, engine, num_workers, self._seconds)
            return staged if isinstance(staged, str) else dataclasses.replace(offer, staged=staged)
        base = self._held.get(engine.url)
        if base is not None:
            reason = await self._send_once(offer, engine, num_workers, base)
            if reason is None:
                return offer
            log.info("version %d is sent whole to the engine at %s: %s", offer.version, engine.url, reason)
        return await self._send_once(offer, engine, num_workers, None) or offer

    async def _send_once(self, offer: Offer, engine: Engine, num_workers: int, base: int | None) -> str | None:
        request: Json = {"version": offer.version, "base": base, "num_workers": num_workers}
        started = await ask_trainer(offer.url, "POST", "/transfers", request, ANSWER_SECONDS)
        if started is None:
            return "the trainer does not hold it any more, or does not answer"
        try:
            await engine.transfers.receive(started["init_info"], seconds=self._seconds)
        except EngineError as error:
            if base is None:
                raise
            return str(error)
        ended = await ask_trainer(offer.url, "GET", f"/transfers/{started['transfer_id']}", {}, self._seconds)
        return "the trainer ended" if ended is None else ended["error"]

    def _has_refused(self, engine: Engine) -> bool:
        if engine.transfers.is_unsupported:
            return True
        refused_at = self._refused_at.get(engine.url)
        return refused_at is not None and time.monotonic() - refused_at < REFUSED_SECONDS

    async def _first_answer(
        self, path: str, seconds: float, is_usable: Callable[[Json], bool]
    ) -> tuple[str, Json] | None:
        """Return the address and the usable answer of the trainer that was announced last; None if none has one.

        All are asked at the same time, and those announced before it are not waited for: the address of a machine that
        is gone may not answer at all, and remains in the ledger until a trainer of its name starts again.
        """
        urls = await self._urls()
        asked = [asyncio.create_task(ask_trainer(url, "GET", path, {}, seconds)) for url in urls]
        try:
            for url, asking in zip(urls, asked, strict=True):
                answer = await asking
                if answer is not None and is_usable(answer):
                    return url, answer
            return None
        finally:
            for asking in asked:
                asking.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def _urls(self) -> list[str]:
        def read() -> list[str]:
            with self._database.read() as connection:
                return weight_servers.weight_urls(connection)

        try:
            return await asyncio.to_thread(read)
        except StoreError as error:
            log.warning("the addresses of weights could not be read: %s", error)
            return []


def _lacks_transfers(error: EngineError) -> bool:
    """Return whether an engine has answered that it has no weight transfers, which only a restart changes."""
    return isinstance(error, EngineRefused) and (error.status in (404, 405) or NOT_CONFIGURED in str(error))
