"""Versions from the trainer's memory: which engine is offered one, and how long it is spared after a failure.

The ledger names the trainers. An engine receives a version while it serves calls as before. Engines that need one at
the same time receive it together and pass it on to each other; where that fails, each gets its own copy. A version that
no trainer holds, or that does not arrive, is loaded from its directory, so a failure here is no failure of the reload.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, ClassVar, NamedTuple

import orjson

from proxy.engines.engine import Engine
from proxy.engines.http_client import Disconnected, HttpClient
from proxy.features.probes import ProbedLoader
from proxy.metrics import Counted
from proxy.reload.loader import Source, has_loaded, is_own_model
from turnwise.engine_plugin import BACKEND
from turnwise.errors import EngineError, EngineRefused, FilesNotRead
from turnwise.features import transfers
from turnwise.store import serving, versions
from turnwise.store.database import Database
from turnwise.types import Json, PolicyKind, PolicyVersion
from turnwise.version_directory import Probe, probe_from

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0
"""How long a trainer may take to answer, unless it is asked to wait for a transfer."""
REFUSED_SECONDS = 60.0
"""How long an engine that refused a transfer gets its versions from directories without being asked again."""
GATHER_SECONDS = 0.1
"""How long no further engine may need a version until those that do receive it together."""
ALONE_SECONDS = 600.0
"""How long engines get copies of their own after they failed to receive a version together."""
LOST_SECONDS = 60.0
"""How long a restarted engine waits for the active version while it is not on disk and no trainer hands it out."""
LACKS_TRANSFERS = ("Weight transfer not configured", "Invalid init_info")
"""What vLLM answers without weight transfers, and with another backend than the plug-in's."""


class Offer(NamedTuple):
    """A version that a trainer holds in memory."""

    version: int
    url: str
    probe: Probe | None


class Receivers:
    """Engines that receive a version together."""

    def __init__(self) -> None:
        self.num_workers: dict[Engine, int] = {}
        """The number of processes that hold a part of each engine's model."""
        self.sending: asyncio.Task[str | None]
        """Ends with what went wrong."""
        self._num_waiting = 0

    async def outcome(self) -> str | None:
        """Wait until all have it, or it failed; when nobody waits any more, the sending ends."""
        self._num_waiting += 1
        try:
            return await asyncio.shield(self.sending)
        finally:
            self._num_waiting -= 1
            if not self._num_waiting:
                self.sending.cancel()


class MemoryLoader(ProbedLoader):
    """Brings engines to versions, from a trainer's memory where it can."""

    counters: ClassVar[Mapping[str, Counted]] = {
        "transfers": ("turnwise_weight_transfers", "Transfers of weights from a trainer's memory by result", ["result"])
    }

    def __init__(self, *of_loader: Any) -> None:
        """Bring engines to versions as `Loader` does."""
        super().__init__(*of_loader)
        self._transfers = self._metrics.counter(*self.counters["transfers"])
        self._spared_until: dict[str, float] = {}
        """When weights from memory may be sent to an engine again, on the monotonic clock, by URL."""
        self._alone_until: dict[str, float] = {}
        """When an engine may receive weights with others again, in the same way."""
        self._gathering: dict[tuple[str, int], Receivers] = {}
        """Engines that have not begun to receive."""
        self._missed: tuple[int, float] | None = None
        """A version that a restarted engine cannot get, and since when, on the monotonic clock."""

    def appeared(self, engine: Engine) -> None:
        self._spared_until.pop(engine.url, None)
        self._alone_until.pop(engine.url, None)

    async def check(self, version: PolicyVersion, engine: Engine) -> None:
        """Check a version as `Loader` does, unless a trainer holds it in memory."""
        if is_own_model(version, engine) or await self._offer(version, engine) is None:
            await super().check(version, engine)

    async def bring(self, engine: Engine, version: PolicyVersion) -> Source | None:
        if version.kind is PolicyKind.LORA or is_own_model(version, engine) or has_loaded(engine, version):
            return None
        offer = await self._offer(version, engine)
        if offer is None:
            return None
        if await self.send(offer, engine):
            self._faults.point("weights_received")
            return Source(offer.probe, functools.partial(load_received, engine, version.version))
        await self.check_directory(version, engine)  # the check of a version that is in memory is its transfer's
        return None

    async def restore(self, engine: Engine, version: PolicyVersion) -> None:
        """Load a version as `Loader` does; fail it if it stays unwritten and no trainer hands it out."""
        try:
            await super().restore(engine, version)
        except FilesNotRead:
            if not version.is_written:
                if self._missed is None or self._missed[0] != version.version:
                    self._missed = version.version, time.monotonic()
                if time.monotonic() - self._missed[1] >= LOST_SECONDS:
                    await self._lease.write(serving.fail_version, version.version, versions.LOST)
            raise

    async def probe(self, version: PolicyVersion, engine: Engine, **limits: float | None) -> Probe | None:
        """Return what the version's directory holds, or else the trainer."""
        found = await super().probe(version, engine, **limits)
        if found is not None:
            return found
        offer = await self._offer(version, engine)
        return None if offer is None else offer.probe

    async def _offer(self, version: PolicyVersion, engine: Engine) -> Offer | None:
        """Return where a version can be had for an engine; None if only from its directory."""
        if version.kind is not PolicyKind.FULL or time.monotonic() < self._spared_until.get(engine.url, 0.0):
            return None
        answer = await first_answer(self._database, f"/versions/{version.version}", ANSWER_SECONDS, lambda _: True)
        if answer is None:
            return None
        url, found = answer
        return Offer(version.version, url, probe_from(found.get("probe")))

    async def send(self, offer: Offer, engine: Engine) -> bool:
        """Let an engine receive a version; what it serves does not change.

        Returns:
            Whether it has all of it; otherwise the version has to be read from its directory.
        """
        seconds = self._settings.reload_timeout_seconds
        try:
            async with asyncio.timeout(seconds):
                problem = await self._send(offer, engine, seconds)
        except TimeoutError:
            problem = f"it took over {seconds:g} s (--reload-timeout-seconds)"
        except EngineError as error:
            problem = str(error)
            self._spared_until[engine.url] = time.monotonic() + REFUSED_SECONDS
            if isinstance(error, EngineRefused) and _takes_no_weights(error):
                self._spared_until[engine.url] = math.inf
                log.warning(
                    "the engine at %s was started without Turnwise's weight transfers, so it reads versions from their "
                    "directories until it is restarted; start it with `turnwise engine` to send them from memory",
                    engine.url,
                )
                return False
        self._transfers.labels("sent" if problem is None else "failed").inc()
        if problem is not None:
            log.warning(
                "version %d was not sent to the engine at %s, its directory is used: %s",
                offer.version,
                engine.url,
                problem,
            )
        return problem is None

    async def _send(self, offer: Offer, engine: Engine, seconds: float) -> str | None:
        match await engine.ask("GET", "/get_world_size"):
            case {"world_size": int(num_workers)} if num_workers > 0:
                pass
            case answer:
                return f"it says {answer!r:.100}, and not how many processes hold a part of its model"
        if not _passes_on(engine) or time.monotonic() < self._alone_until.get(engine.url, 0.0):
            return await self._transfer(offer, {engine: num_workers}, seconds)
        key = offer.url, offer.version
        group = self._gathering.get(key)
        if group is None or group.sending.cancelling():
            group = self._gathering[key] = Receivers()
            group.sending = asyncio.create_task(self._send_together(offer, group, seconds))
        group.num_workers[engine] = num_workers
        problem = await group.outcome()
        if problem is not None and len(group.num_workers) > 1:
            problem = await self._transfer(offer, {engine: num_workers}, seconds)
            if problem is None:
                self._alone_until[engine.url] = time.monotonic() + ALONE_SECONDS
        return problem

    async def _send_together(self, offer: Offer, group: Receivers, seconds: float) -> str | None:
        number, key = 0, (offer.url, offer.version)
        try:
            while number != len(group.num_workers):
                number = len(group.num_workers)
                await asyncio.sleep(GATHER_SECONDS)
        finally:
            if self._gathering.get(key) is group:
                del self._gathering[key]
        try:
            problem = await self._transfer(offer, group.num_workers, seconds)
        except EngineError as error:
            if number == 1:
                raise
            problem = str(error)
        if problem is not None and number > 1:
            log.warning("version %d was not sent to %d engines together: %s", offer.version, number, problem)
        return problem

    async def _transfer(self, offer: Offer, receivers: Mapping[Engine, int], seconds: float) -> str | None:
        """Send a version to engines with these numbers of workers; return what went wrong.

        Raises:
            EngineError: an engine refuses it.
        """
        request: Json = {"version": offer.version, "num_workers": sum(receivers.values())}
        started = await ask_trainer(offer.url, "POST", "/transfers", request, ANSWER_SECONDS)
        if started is None:
            return "the trainer does not hold it any more, or does not answer"
        first_rank, asked, path = 1, list[Coroutine[Any, Any, Any]](), f"/transfers/{started['transfer_id']}"
        coming_seconds = min(seconds, started["init_info"]["seconds"])  # the trainer waits no longer for an engine
        for engine, num_workers in receivers.items():
            body = {"init_info": started["init_info"] | {"first_rank": first_rank}}
            asked.append(engine.ask("POST", "/init_weight_transfer_engine", body, seconds=coming_seconds))
            first_rank += num_workers
        try:
            await _all_answers(asked)
            ended = await ask_trainer(offer.url, "GET", path, {}, seconds)
        except BaseException:  # also where nobody waits for it any more
            await ask_trainer(offer.url, "POST", f"{path}/end", {}, ANSWER_SECONDS)
            raise
        return "the trainer ended" if ended is None else ended["error"]


async def _all_answers(asked: list[Coroutine[Any, Any, Any]]) -> None:
    """Wait for all answers, then raise the first error: no engine may begin late, over a copy that it has by then."""
    for outcome in await asyncio.gather(*asked, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _passes_on(engine: Engine) -> bool:
    """Return whether an engine says that it was started with the plug-in's weight transfers."""
    match engine.info:
        case {"vllm_config": {"weight_transfer_config": {"backend": str(backend)}}}:
            return backend == BACKEND
    return False


def _takes_no_weights(refused: EngineRefused) -> bool:
    return refused.status in (404, 405) or any(words in str(refused) for words in LACKS_TRANSFERS)


async def load_received(engine: Engine, version: int, *, seconds: float) -> None:
    """Replace the base weights with a version that the engine received.

    Raises:
        ReloadFailed: the engine refused it.
    """
    with engine.loading(f"version {version}, which it had received"):
        try:
            await engine.ask("POST", "/start_weight_update", seconds=seconds)
        except EngineRefused:  # a process that died had started an update
            await engine.ask("POST", "/finish_weight_update", {}, seconds=seconds)
            await engine.ask("POST", "/start_weight_update", seconds=seconds)
        await engine.ask("POST", "/update_weights", {"update_info": {"version": version}}, seconds=seconds)
        await engine.ask("POST", "/finish_weight_update", {}, seconds=seconds)


async def first_answer(
    database: Database, path: str, seconds: float, is_usable: Callable[[Json], bool]
) -> tuple[str, Json] | None:
    """Return the address and the usable answer of the trainer that was announced last; None if none has one.

    All are asked at the same time, and those announced before it are not waited for: the address of a machine that
    is gone may not answer at all, and remains in the ledger until a trainer of its name starts again.
    """
    urls = await database.fetch(transfers.weight_urls)
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


async def ask_trainer(url: str, method: str, path: str, body: Json, seconds: float) -> Json | None:
    http = HttpClient(url, connect_seconds=CONNECT_SECONDS, silence_seconds=seconds)
    data = orjson.dumps(body) if body else b""
    try:
        async with asyncio.timeout(seconds):
            with await http.request(method, path, data, {"content-type": "application/json"}) as answer:
                raw = await answer.read()
        found: Json = orjson.loads(raw)
    except (Disconnected, TimeoutError, orjson.JSONDecodeError) as error:
        log.info("a trainer that the ledger names does not hand out weights: %s", error)
        return None
    finally:
        await http.close()
    return found if answer.status == 200 else None
