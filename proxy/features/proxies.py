"""What the processes of all proxies on one PostgreSQL tell each other, as the workers of one proxy do by their parent.

An engine stays paused after a load until all of them label its next token with the version, one that gets a version on
trial is drained by all, and a revoked key is forgotten at once. A process whose connection is down, or whose pooler
passes no messages on, reads labels with the reloader's next round, and the driver of a reload does not wait for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from typing import TYPE_CHECKING, Any, cast

from proxy.services import Beside, Process
from turnwise.errors import StoreError
from turnwise.features.proxies import ANSWER_SECONDS, listen, send

if TYPE_CHECKING:
    from proxy.services import Services

log = logging.getLogger(__name__)
OWN = frozenset({"session"})
"""Changes that other proxies need not follow: those of a session they see with its next turn."""
RETRY_SECONDS = 1.0
POOLER_SECONDS = 60.0
"""When messages are tried again that did not arrive."""


class Proxies(Beside):
    """Listens, and sends, beside what the process does with the others of its own proxy."""

    def __init__(self, services: Services) -> None:
        self._services, self._inner = services, services.process
        self._name = uuid.uuid4().hex
        self._pid = 0
        """This process's listening connection at the server; 0 without one."""
        self._confirmed: dict[str, set[str]] = {}
        """Who has confirmed, by the receipt of a change that this process waits for."""
        self._arrived = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_on = services.database.dialect == "postgresql"
        if self._is_on:
            services.process = cast("Process", _OverAll(self, self._inner))
            services.closing.append(self._close)

    async def run(self) -> None:
        while self._is_on:
            try:
                await self._listen()
            except StoreError as error:
                log.warning("%s; other proxies' reloads are followed within a round", error)
            except Exception:  # the task's outermost edge: an unexpected error must not end it
                log.exception("other proxies' messages could not be read, will retry")
            self._pid = 0
            await asyncio.sleep(RETRY_SECONDS)

    def tell(self, change: str, *of: str) -> None:
        if change not in OWN:
            self._start(self._tell([self._name, "", change, *of]))

    async def confirm(self, seconds: float, change: str, *of: str) -> None:
        """Tell all others of a change, and wait at most so long until those that listen have followed it."""
        receipt = uuid.uuid4().hex
        followed = self._confirmed[receipt] = set()
        num_others = 0
        try:
            async with asyncio.timeout(seconds):
                num_others = await self._send([self._name, receipt, change, *of])
                async with self._arrived:
                    await self._arrived.wait_for(lambda: len(followed) >= num_others)
        except TimeoutError:
            log.warning("%d of %d proxies have followed %s within %g s", len(followed), num_others, change, seconds)
        except StoreError as error:
            log.warning("other proxies were not told of %s, and follow within a round: %s", change, error)
        finally:
            del self._confirmed[receipt]

    async def _listen(self) -> None:
        url = self._services.settings.database.get_secret_value()
        async with contextlib.aclosing(listen(url)) as messages:
            self._pid = await anext(messages)
            await self._send([self._name, "", "hello"])
            async for message in messages:
                await self._take(message)
        log.warning("the pooler before the database passes no messages on; let it keep one connection for each session")
        await asyncio.sleep(POOLER_SECONDS)

    async def _take(self, message: Any) -> None:
        match message:
            case [str(sender), str(receipt), "followed"]:
                await self._note(receipt, sender)
            case [str(sender), str(receipt), str(change), *of]:
                if sender != self._name:
                    self._start(self._follow(receipt, change, of))
            case _:
                log.warning("a message on the database's channel is not a proxy's, and is not followed: %r", message)

    async def _note(self, receipt: str, sender: str) -> None:
        async with self._arrived:
            self._confirmed.get(receipt, set()).add(sender)
            self._arrived.notify_all()

    async def _follow(self, receipt: str, change: str, of: list[str]) -> None:
        """Follow a change, and confirm it; one of which this proxy knows nothing, as "hello", needs nothing."""
        follow = self._services.changes.get(change)
        if follow is not None:
            await follow(*of)
        if receipt:
            await self._tell([self._name, receipt, "followed"])

    async def _tell(self, message: list[str]) -> None:
        try:
            await self._send(message)
        except StoreError as error:
            log.warning("other proxies were not told of %s, and follow within a round: %s", message[2], error)

    async def _send(self, message: list[str]) -> int:
        def call() -> int:
            with self._services.database.write() as connection:
                return send(connection, message, self._pid)

        return await asyncio.to_thread(call)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_SECONDS)


class _OverAll:
    """The process of one proxy, which tells those of the other proxies too."""

    def __init__(self, proxies: Proxies, inner: Process) -> None:
        self._proxies, self._inner = proxies, inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def tell(self, change: str, *of: str) -> None:
        self._inner.tell(change, *of)
        self._proxies.tell(change, *of)

    async def confirm(self, seconds: float, change: str, *of: str) -> None:
        await asyncio.gather(self._inner.confirm(seconds, change, *of), self._proxies.confirm(seconds, change, *of))
