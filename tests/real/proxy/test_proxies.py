"""What proxies on one PostgreSQL tell each other, without waiting for a round of the reloader."""

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
from support.waiting import WAIT_SECONDS, wait_until

from proxy.features.proxies import Proxies
from proxy.services import Process
from turnwise.store.database import Database

pytestmark = pytest.mark.postgres
URL, VERSION = "http://engine:8000", "7"


@contextlib.asynccontextmanager
async def a_proxy(url: str, followed: asyncio.Queue[Any], may_follow: asyncio.Event | None = None) -> Any:
    """Run what one proxy tells and is told until the block ends; yield its `Process`."""

    async def follow(*of: str) -> None:
        if may_follow is not None:
            await may_follow.wait()
        await followed.put(of)

    database = Database(url)
    services: Any = SimpleNamespace(
        process=Process(),
        database=database,
        settings=SimpleNamespace(database=SimpleNamespace(get_secret_value=lambda: url)),
        changes={"weights": follow, "keys": follow, "drained": follow},
        closing=[],
    )
    running = asyncio.create_task(Proxies(services).run())
    try:
        yield services.process
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for close in services.closing:
            await close()
        database.close()


async def wait_for_listeners(url: str, number: int) -> None:
    with contextlib.closing(Database(url)) as database:

        def are_there() -> bool:
            locks = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
            of_this = " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
            with database.read() as connection:
                return connection.exec_driver_sql(locks + of_this).scalar_one() == number

        await asyncio.to_thread(wait_until, are_there, f"{number} processes listen")


@pytest.fixture
def url(postgres_server, postgres_template):
    return postgres_server.url(postgres_server.create_database(postgres_template))


async def test_a_label_is_followed_by_all_proxies_before_the_engine_goes_on_and_none_waits_for_one_that_ended(url):
    own, slow, quick = [asyncio.Queue[Any]() for _ in range(3)]
    may_follow = asyncio.Event()
    async with a_proxy(url, own) as driver, asyncio.timeout(WAIT_SECONDS):
        async with a_proxy(url, slow, may_follow), a_proxy(url, quick):
            await wait_for_listeners(url, 3)
            confirmed = asyncio.create_task(driver.confirm(2 * WAIT_SECONDS, "weights", URL, VERSION))
            assert await quick.get() == (URL, VERSION)
            assert not confirmed.done()
            may_follow.set()
            await confirmed
            assert slow.get_nowait() == (URL, VERSION)
            driver.tell("keys")
            assert await slow.get() == ()
        await wait_for_listeners(url, 1)
        await driver.confirm(2 * WAIT_SECONDS, "weights", URL, VERSION)
        assert own.empty()


async def test_an_engine_is_drained_by_all_proxies_and_messages_of_other_programs_are_passed_over(url):
    followed: asyncio.Queue[Any] = asyncio.Queue()
    async with a_proxy(url, asyncio.Queue()) as driver, a_proxy(url, followed), asyncio.timeout(WAIT_SECONDS):
        await wait_for_listeners(url, 2)
        with contextlib.closing(Database(url)) as database, database.write() as connection:
            for payload in ("vacuumed", '{"of": "another program"}', '["short"]'):
                connection.exec_driver_sql("SELECT pg_notify('turnwise', %s)", (payload,))
        await driver.confirm(2 * WAIT_SECONDS, "drained", URL)
        assert followed.get_nowait() == (URL,)
        await driver.confirm(2 * WAIT_SECONDS, "of another release", URL)


async def test_a_proxy_listens_again_when_the_server_has_ended_its_connection(url):
    followed: asyncio.Queue[Any] = asyncio.Queue()
    async with a_proxy(url, asyncio.Queue()) as driver, a_proxy(url, followed), asyncio.timeout(WAIT_SECONDS):
        await wait_for_listeners(url, 2)
        with contextlib.closing(Database(url)) as database, database.write() as connection:
            ended = "SELECT count(pg_terminate_backend(pid)) FROM pg_locks WHERE mode = 'ShareLock'"
            connection.exec_driver_sql(f"{ended} AND locktype = 'advisory'")
        await wait_for_listeners(url, 2)
        await driver.confirm(2 * WAIT_SECONDS, "weights", URL, VERSION)
        assert followed.get_nowait() == (URL, VERSION)
