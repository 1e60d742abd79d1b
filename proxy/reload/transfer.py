"""Versions from the trainer's memory: which engine is offered one, and how long it is spared after a failure.

The ledger names the trainers. A version that no trainer holds, or that does not arrive, is loaded from its directory,
so a failure here is no failure of the reload.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Callable

import orjson

from proxy.engines.engine import Engine
from proxy.engines.http_client import Disconnected, HttpClient
from proxy.metrics import Metrics
from turnwise.errors import EngineError, EngineRefused
from turnwise.store import notices
from turnwise.store.database import Database
from turnwise.types import Json, PolicyKind, PolicyVersion
from turnwise.version_directory import Probe, probe_from

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0
"""How long a trainer may take to answer, unless it is asked to wait for a transfer."""
REFUSED_SECONDS = 60.0
"""How long an engine that refused a transfer gets its versions from directories without being asked again."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offer:
    """A version that a trainer holds in memory."""

    version: int
    url: str
    probe: Probe | None


class Transfers:
    """Asks trainers for versions, and engines to receive them."""

    def __init__(self, database: Database, metrics: Metrics, *, seconds: float) -> None:
        self._database = database
        self._metrics = metrics
        self._seconds = seconds

    async def offer(self, version: PolicyVersion, engine: Engine) -> Offer | None:
        """Return where a version can be had for an engine; None if only from its directory."""
        if version.kind is not PolicyKind.FULL or time.monotonic() < engine.transfers_from:
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
        try:
            async with asyncio.timeout(self._seconds):
                problem = await self._send(offer, engine)
        except TimeoutError:
            problem = f"it took over {self._seconds:g} s (--reload-timeout-seconds)"
        except EngineError as error:
            problem = str(error)
            engine.transfers_from = time.monotonic() + REFUSED_SECONDS
            if isinstance(error, EngineRefused) and engine.says_it_takes_no_weights(error):
                engine.transfers_from = math.inf
                log.warning(
                    "the engine at %s was started without Turnwise's weight transfers, so it reads versions from their "
                    "directories until it is restarted; start it with `turnwise engine` to send them from memory",
                    engine.url,
                )
                return False
        self._metrics.weight_transfers.labels("sent" if problem is None else "failed").inc()
        if problem is not None:
            log.warning(
                "version %d was not sent to the engine at %s, its directory is used: %s",
                offer.version,
                engine.url,
                problem,
            )
        return problem is None

    async def _send(self, offer: Offer, engine: Engine) -> str | None:
        request: Json = {"version": offer.version, "num_workers": await engine.num_workers()}
        started = await ask_trainer(offer.url, "POST", "/transfers", request, ANSWER_SECONDS)
        if started is None:
            return "the trainer does not hold it any more, or does not answer"
        await engine.receive_weights(started["init_info"], seconds=self._seconds)
        ended = await ask_trainer(offer.url, "GET", f"/transfers/{started['transfer_id']}", {}, self._seconds)
        return "the trainer ended" if ended is None else ended["error"]


async def first_answer(
    database: Database, path: str, seconds: float, is_usable: Callable[[Json], bool]
) -> tuple[str, Json] | None:
    """Return the address and the usable answer of the trainer that was announced last; None if none has one.

    All are asked at the same time, and those announced before it are not waited for: the address of a machine that
    is gone may not answer at all, and remains in the ledger until a trainer of its name starts again.
    """
    urls = await database.fetch(notices.weight_urls)
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
