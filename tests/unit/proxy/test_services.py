"""What engines that start together do once for all of them."""

import asyncio
from types import SimpleNamespace

import pytest
from support.migrated import migrated
from support.waiting import WAIT_SECONDS

from proxy import services
from proxy.auth import open_authenticator
from proxy.settings import ProxySettings
from turnwise.errors import EngineUnavailable
from turnwise.store.database import Database


@pytest.mark.parametrize(("first", "num_tries"), [("finds", 1), ("differs", 2), ("leaves", 2), ("hangs", None)])
async def test_engines_load_the_chat_template_one_by_one_until_one_has_found_it(
    tmp_path, monkeypatch, first, num_tries
):
    """One that hangs does not hold up the others, which then do not wait for each other either."""
    tries, answers, template = [], asyncio.Event(), SimpleNamespace(fields_read=frozenset())

    async def find_template(engine, *_, **__):
        tries.append(engine)
        if len(tries) == 1 and first == "leaves":
            raise EngineUnavailable("it is gone")
        await (answers.wait() if len(tries) == 1 and first == "hangs" else asyncio.sleep(0))
        return None if len(tries) == 1 and first == "differs" else template

    monkeypatch.setattr(services, "find_template", find_template)
    monkeypatch.setattr(services, "FIND_SECONDS", 0.01 if first == "hangs" else WAIT_SECONDS)
    url = f"sqlite:///{tmp_path}/turnwise.db"
    database = Database(migrated(url))
    settings = ProxySettings(engine=[f"http://127.0.0.1:{number}" for number in (1, 2, 3)], database=url)
    gate = open_authenticator(database, settings)
    proxy = services.Services(settings, database, gate, services.NO_FEATURES, services.Process())
    checks = [asyncio.create_task(proxy._check_engine(engine)) for engine in proxy.pool.engines]
    async with asyncio.timeout(WAIT_SECONDS):
        await asyncio.wait(checks[1:])
        assert proxy.sessions.template is template
        assert checks[0].done() == (first != "hangs")
        answers.set()
        outcomes = await asyncio.gather(*checks, return_exceptions=True)
    assert [str(each) for each in outcomes if each is not None] == (["it is gone"] if first == "leaves" else [])
    assert num_tries in (None, len(tries))
    await proxy.pool.close()
    database.close()
