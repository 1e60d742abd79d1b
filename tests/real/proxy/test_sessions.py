"""Which session a call belongs to, and the number of reads to find it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from proxy.auth import Principal
from proxy.dialects.base import Call
from proxy.dialects.chat import ChatCompletions
from proxy.features.inferred import Inferred, SessionIds
from proxy.features.lengths import continued_length
from proxy.metrics import Metrics
from proxy.sessions import memory
from proxy.sessions.place import CallPlace, Sessions
from proxy.settings import ProxySettings
from proxy.writer.client import Writer
from proxy.writer.process import NewTurn
from turnwise.errors import Conflict
from turnwise.features import retention
from turnwise.store.database import Connection, Database
from turnwise.store.rows import to_micros
from turnwise.store.selection import SessionFilter
from turnwise.store.sessions import end_session, list_sessions
from turnwise.types import Json, Session

AGENT = Principal(tenant="default", role="agent", key_id="key", root_key_id="key")
HELLO: Json = {"role": "user", "content": "Hello."}
REPLY: Json = {"role": "assistant", "content": "Hi."}


class CountedReads(Database):
    num_reads = 0

    @contextlib.contextmanager
    def read(self) -> Iterator[Connection]:
        self.num_reads += 1
        with super().read() as connection:
            yield connection


@pytest.fixture
def database(database_url: str) -> Iterator[CountedReads]:
    opened = CountedReads(database_url)
    yield opened
    opened.close()


@pytest.fixture
async def writer(database_url: str):
    started = Writer(ProxySettings(database=database_url), Metrics())
    await started.start()
    yield started
    await started.close()


@pytest.fixture
def sessions(database: CountedReads, writer: Writer) -> Sessions:
    return Sessions(database, writer, ProxySettings(), Metrics(), unnamed=Inferred)


def call_of(*messages: Json, **fields) -> Call:
    call = ChatCompletions().parse({"messages": list(messages)})
    for field, value in fields.items():
        setattr(call, field, value)
    return call


async def found(sessions: Sessions, call: Call, principal: Principal = AGENT) -> CallPlace:
    return await sessions.find(call, principal)


def replied(sessions: Sessions, place: CallPlace, call: Call) -> None:
    session, (full, messages, dialogue) = place.session, place.conversation.extended(REPLY)
    turn = NewTurn(
        turn_id=f"{session.session_id}-{len(call.messages)}",
        session_id=session.session_id,
        session_created_at=session.created_at,
        chain_id="c",
        model="m",
        messages=call.messages,
        response=REPLY,
        token_ids=np.zeros(1, np.int32),
        history_digest=full,
        messages_digest=messages,
        dialogue_digest=dialogue,
    )
    sessions.remember(place, [turn])


async def test_a_conversation_in_memory_needs_no_database_read(sessions: Sessions, database: CountedReads):
    first = call_of(HELLO)
    place = await found(sessions, first)
    replied(sessions, place, first)
    reads = database.num_reads
    assert (await found(sessions, call_of(HELLO, REPLY, HELLO))).live is place.live
    assert database.num_reads == reads
    assert place.inferred_by == "key"


async def test_a_conversation_that_is_not_in_memory_is_read_once(sessions: Sessions, database: CountedReads):
    reads = database.num_reads
    await found(sessions, call_of(HELLO, REPLY, HELLO, REPLY, HELLO))
    assert database.num_reads == reads + 1


def end(sessions: Sessions, database: CountedReads, session_id: str) -> None:
    with database.write() as connection:
        end_session(connection, "default", session_id)
    sessions.cache.drop(("default", session_id))


@pytest.mark.parametrize("how", ["path", "key", "created"])
async def test_a_call_in_an_ended_session_of_a_harness_is_refused(sessions: Sessions, database: CountedReads, how: str):
    """The path or a key names it, or it was created explicitly."""
    principal = AGENT
    call = call_of(HELLO, session_id="named", session_source="path" if how == "path" else "x-session-id")
    if how != "path":
        created = await sessions.cache.create(Session(session_id="named", opened_by="api"))
        if how == "key":
            created_at = to_micros(created.created_at)
            principal = dataclasses.replace(AGENT, session_id="named", session_created_at=created_at)
    await found(sessions, call, principal)
    end(sessions, database, "named")
    with pytest.raises(Conflict, match="'named' is ended; create a new one"):
        await found(sessions, call, principal)


async def test_an_ended_session_that_an_application_named_continues_in_a_linked_session(
    sessions: Sessions, database: CountedReads, writer: Writer
):
    """Each time that it has ended; each is linked to the one before. A restarted proxy asks only for the newest."""
    call = call_of(HELLO, session_id="named", session_source="x-session-id")
    seen = []
    for _ in range(3):
        session = (await found(sessions, call)).live.session
        seen.append((session.session_id, session.continues))
        end(sessions, database, session.session_id)
    assert seen == [("named", None), ("named~2", "named"), ("named~3", "named~2")]
    cold = Sessions(database, writer, ProxySettings(), Metrics(), unnamed=Inferred)
    session = (await found(cold, call)).live.session
    assert (session.session_id, session.continues) == ("named~4", "named~3")
    assert cold.cache.find((session.tenant, "named~2")) is None


async def test_the_memory_of_ended_sessions_is_bounded_and_the_store_has_those_that_were_dropped(
    writer: Writer, database: CountedReads, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(memory, "MAX_SESSIONS", 2)
    sessions = Sessions(database, writer, ProxySettings(), Metrics(), unnamed=Inferred)
    names = ["first", "second", "third"]
    for name in names:
        call = call_of(HELLO, session_id=name, session_source="x-session-id")
        await found(sessions, call)
        end(sessions, database, name)
        assert (await found(sessions, call)).live.session.session_id == f"{name}~2"
    assert len(sessions.cache) == 2
    again = [await found(sessions, call_of(HELLO, session_id=name, session_source="x-session-id")) for name in names]
    assert [place.live.session.session_id for place in again] == ["first~2", "second~2", "third~2"]


def test_the_sessions_of_a_conversation_are_bounded_too():
    """Otherwise an evaluation that repeats one greedy conversation would fill the memory with its sessions."""
    inferred, caller = SessionIds(3), ("default", "key", 0)
    for name in ("s0", "s1", "s2", "s2"):
        inferred.add(caller, b"often", name)
    assert inferred.find(caller, b"often") == ("s0", "s1", "s2")
    inferred.add(caller, b"often", "s3")
    assert inferred.find(caller, b"often") == ("s1", "s2", "s3")
    inferred.add(caller, b"once", "s9")
    assert (inferred.find(caller, b"often"), inferred.find(caller, b"once")) == ((), ("s9",))
    assert inferred.find(("other", "key", 0), b"once") == ()


async def test_a_keyed_retry_at_another_proxy_belongs_to_the_session_that_the_first_call_found(
    sessions: Sessions, database: CountedReads, writer: Writer
):
    """The other proxy does not know the conversation, whose last turn is not stored yet."""
    first = call_of(HELLO)
    place = await found(sessions, first)
    replied(sessions, place, first)
    retried = [
        await found(each, call_of(HELLO, REPLY, HELLO, idempotency_key="k"))
        for each in (sessions, Sessions(database, writer, ProxySettings(), Metrics(), unnamed=Inferred))
    ]
    assert [each.live.key for each in retried] == [place.live.key] * 2


async def test_calls_with_one_idempotency_key_share_a_session_until_it_ends(sessions: Sessions, database: CountedReads):
    """Calls of another API key do not share it."""
    keyed = [(await found(sessions, call_of(HELLO, idempotency_key="k"))).live for _ in range(2)]
    assert keyed[0] is keyed[1]
    other = Principal(tenant="default", role="agent", key_id="other", root_key_id="other")
    assert (await found(sessions, call_of(HELLO, idempotency_key="k"), other)).live is not keyed[0]
    session_id = keyed[0].session.session_id
    with database.write() as connection:
        end_session(connection, "default", session_id)
    sessions.cache.drop(("default", session_id))
    assert (await found(sessions, call_of(HELLO, idempotency_key="k"))).live.session.session_id != session_id


async def test_a_session_that_another_proxy_has_deleted_is_created_anew_and_found_by_no_conversation(
    sessions: Sessions, database: CountedReads
):
    """It is still in this proxy's memory. What only looks for a session creates none."""
    named = await sessions.cache.create(Session(session_id="named"))
    first = call_of(HELLO)
    place = await found(sessions, first)
    replied(sessions, place, first)
    with database.write() as connection:
        for session_id in ("named", place.live.session.session_id):
            retention.delete_session(connection, "default", session_id)
    again = await sessions.cache.create(Session(session_id="named"))
    assert again.created_at > named.created_at
    assert (await found(sessions, call_of(HELLO, session_id="named"))).live.session == again
    sessions.cache.drop(place.live.key)
    assert await continued_length(sessions, call_of(HELLO, REPLY, HELLO), AGENT) is None
    with database.read() as connection:
        listed, _ = list_sessions(connection, SessionFilter())
    assert [session.session_id for session in listed] == ["named"]
