"""Which engine and which weights a session's calls get; a change of one engine moves few sessions."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.conversations import new_chain

from proxy.dialects.chat import ChatCompletions
from proxy.engines.engine import LOADING, UNLABELLED, Engine, EngineState, Lane
from proxy.engines.pool import EnginePool
from proxy.features.page.activity import MAX_WAITING, ActivityRecorder
from proxy.metrics import Metrics
from proxy.reload.loader import is_own_model
from turnwise.adapter_names import adapter_name, is_adapter_name, own_version
from turnwise.errors import InvalidRequest, StoreError
from turnwise.features.page.activity import Activity
from turnwise.store.database import Database
from turnwise.types import PolicyVersion, Session

URLS = ["http://a", "http://b", "http://c"]
NO_STORE = Database("sqlite:///never-opened.db")
"""Never opened: no policy is on trial."""
SESSIONS = [Session(session_id=f"s{number}") for number in range(600)]


@pytest.fixture
async def pool() -> AsyncIterator[EnginePool]:
    """A pool of engines that are ready; no request is sent to them."""
    pool = EnginePool(URLS, Metrics(), NO_STORE, timeout_seconds=1)
    for engine in pool.engines:
        engine.change(EngineState.READY)
    yield pool
    await pool.close()


def homes(pool: EnginePool) -> dict[str, str]:
    return {session.session_id: pool.lane(session).engine.url for session in SESSIONS}


async def test_sessions_are_spread_and_stay(pool):
    """600 over three engines: 200 each, ± 11.5 (one standard deviation)."""
    where = homes(pool)
    assert all(abs(list(where.values()).count(url) - 200) < 60 for url in URLS)
    assert homes(pool) == where


async def test_the_loss_of_an_engine_moves_only_its_own_sessions_and_its_return_moves_them_back(pool):
    before = homes(pool)
    pool.engines[1].change(EngineState.ABSENT)
    without = homes(pool)
    assert {key for key in before if before[key] != without[key]} == {
        key for key, url in before.items() if url == URLS[1]
    }
    pool.engines[1].change(EngineState.READY)
    assert homes(pool) == before


async def test_an_engine_that_drains_gets_no_new_calls_while_there_is_another(pool):
    pool.engines[0].change(EngineState.DRAINING)
    assert set(homes(pool).values()) == set(URLS[1:])
    for engine in pool.engines:
        engine.change(EngineState.DRAINING)
    assert set(homes(pool).values()) == set(URLS)


async def test_a_call_waits_while_its_engine_is_paused_and_calls_of_other_engines_do_not(pool):
    closed, session = pool.engines[0], next(s for s in SESSIONS if pool.lane(s).engine is pool.engines[0])
    other = next(s for s in SESSIONS if pool.lane(s).engine is pool.engines[1])
    with closed.reloading():
        waiting = asyncio.ensure_future(enter(pool, session))
        assert (await enter(pool, other)).engine is pool.engines[1]
        assert not waiting.done()
    assert (await waiting).engine is closed


async def enter(pool: EnginePool, session: Session) -> Lane:
    lane = await pool.admit(session)
    assert lane.num_calls == 1
    pool.release(lane)
    return lane


@pytest.mark.parametrize(
    ("label", "held", "version"), [("7", 7, 7), ("default", UNLABELLED, 0), (None, UNLABELLED, 0), (LOADING, None, 3)]
)
async def test_the_label_of_the_weights_sets_the_loaded_version(pool, label, held, version):
    """During the exchange there is no version; tokens sampled before it have the previous version."""
    engine: Engine = pool.engines[0]
    engine.apply_label("3")
    engine.apply_label(label)
    assert (engine.loaded_version, pool.version_on(engine)) == (held, version)


async def test_an_adapter_is_not_named_for_what_is_sampled_after_an_exchange_of_its_base(pool):
    """A roll-back to whole weights does not wait for the adapter's running calls: their last version is the new one."""
    engine = pool.engines[0]
    adapter = Lane(engine, 7, "seventh")
    assert adapter.sampled_version == 7
    engine.apply_label("3")
    assert (adapter.sampled_version, engine.base_lane.sampled_version) == (3, 3)
    engine.apply_label("0")
    assert adapter.sampled_version == 7


def test_an_adapters_name_tells_its_version_to_its_own_database_alone():
    ours, theirs, digest = "0" * 12, "f" * 12, "a" * 64
    assert own_version(adapter_name(12, ours, digest), ours) == 12
    assert adapter_name(12, ours, digest) != adapter_name(12, ours, "b" * 64)
    assert [is_adapter_name(adapter_name(1, theirs, digest)), is_adapter_name("policy-v1")] == [True, True]
    strange = [adapter_name(12, theirs, digest), "policy-v12", "policy-v", "policy-vx", "12", "my-policy-v1"]
    assert [own_version(name, ours) for name in strange] == [None] * 6
    assert [own_version("policy-v12", ""), is_adapter_name("my-policy-v1")] == [None, False]


async def test_an_engine_counts_as_lora_enabled_from_its_first_adapter(pool):
    """Without the probe there is no other way to detect it."""
    engine = pool.engines[0]
    engine.adapters[3] = Lane(engine, 3, "third")
    call = ChatCompletions().parse({"echo": True})
    with pytest.raises(InvalidRequest, match="LoRA"):
        await engine.sample(call, new_chain(), "", {})


async def test_a_label_that_was_read_before_another_worker_announced_a_new_one_is_not_applied(monkeypatch):
    """The engine's answer arrives after the announcement of the load that it precedes."""
    pool = EnginePool(URLS, Metrics(), NO_STORE, timeout_seconds=1.0)
    engine = pool.engines[0]

    async def answer() -> str:
        pool.note_label(engine.url, "8")
        return "7"

    monkeypatch.setattr(engine, "weights_label", answer)
    await engine.read_label()
    assert (engine.loaded_version, pool.version_on(engine)) == (8, 8)


@pytest.mark.parametrize(
    ("path", "digest", "own_digest", "is_own"),
    [
        ("/models/own", None, None, True),
        ("/elsewhere", "a", "a", True),
        ("/elsewhere", "a", "b", False),  # the engine was started with the directory of a later version
        ("/elsewhere", "a", None, True),  # the engine's files are on another machine
        ("/elsewhere", None, "a", False),  # it was published from a directory
    ],
)
async def test_version_0_is_an_engines_own_model_by_its_digest_or_its_path(pool, path, digest, own_digest, is_own):
    engine = pool.engines[0]
    engine.model_path = "/models/own"
    engine.own_model = PolicyVersion(version=0, path="/models/own", model_digest=own_digest)
    assert is_own_model(PolicyVersion(version=0, path=path, model_digest=digest), engine) == is_own
    assert not is_own_model(PolicyVersion(version=1, path=path, model_digest=digest), engine)


MINUTE = 29_000_000


class FailingOnce:
    def __init__(self) -> None:
        self.num_writes = 0
        self.stored: dict[tuple[int, str], Activity] = {}

    async def do(self, change: Any, seen: dict[tuple[int, str], Activity]) -> None:
        self.num_writes += 1
        if self.num_writes == 1:
            raise StoreError("the store does not answer")
        self.stored |= seen


async def test_minutes_that_wait_too_long_for_the_store_are_dropped_and_counted():
    """Of 1,003 minutes the three oldest are dropped."""
    writer, metrics = FailingOnce(), Metrics()
    pool = EnginePool(["http://a"], metrics, NO_STORE, timeout_seconds=1)
    recorder = ActivityRecorder(pool, writer, metrics)
    pool.engines[0].change(EngineState.READY)
    for minute in range(MAX_WAITING + 3):
        recorder.sample(60 * (MINUTE + minute))
    await recorder.store()
    assert b"\nturnwise_lost_engine_activity_minutes_total 3.0\n" in metrics.render()
    await recorder.store()
    assert sorted(writer.stored) == [(MINUTE + minute, "http://a") for minute in range(3, MAX_WAITING + 3)]
    await pool.close()


async def test_a_second_is_busy_if_a_call_ran_in_it_however_short():
    writer, metrics = FailingOnce(), Metrics()
    pool = EnginePool(["http://a", "http://b"], metrics, NO_STORE, timeout_seconds=1)
    recorder = ActivityRecorder(pool, writer, Metrics())
    pool.engines[0].change(EngineState.READY)
    recorder.sample(60 * MINUTE)  # second 0: no call
    session = Session(session_id="s")
    pool.release(await pool.admit(session))  # it ends before the sample of second 1
    recorder.sample(60 * MINUTE + 1.9)
    lane = await pool.admit(session)
    assert b"\nturnwise_calls_in_flight 1.0\n" in metrics.render()
    recorder.sample(60 * MINUTE + 2)
    await recorder.store()
    recorder.sample(60 * MINUTE + 3)  # it still runs
    pool.release(lane)
    recorder.sample(60 * MINUTE + 4)
    await recorder.store()
    # Seconds 0 to 4 were served and 1 to 3 busy; what the first write did not store came with the second.
    assert writer.stored == {(MINUTE, "http://a"): Activity(served=0b11111, busy=0b01110)}
    await pool.close()
