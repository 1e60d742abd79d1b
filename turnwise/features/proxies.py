"""Messages between all proxy processes on one PostgreSQL: who listens, and what is sent to those.

A process that listens holds a shared advisory lock, so PostgreSQL knows who does: a process that dies loses its
connection and with it the lock, and no clock is compared. SQLite has neither; nor has a pooler that gives each
transaction another connection, which the first message finds out.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import psycopg
import sqlalchemy as sa

from turnwise.errors import StoreUnavailable
from turnwise.store.database import Connection

CHANNEL = "turnwise"
_LOCK = 0x7475726E, 1
_IS_LOCK = "locktype = 'advisory' AND classid = {} AND objid = {} AND objsubid = 2 AND granted".format(*_LOCK)
_OTHERS = (
    f"SELECT count(*) FROM pg_locks WHERE {_IS_LOCK} AND pid <> :own"  # noqa: S608
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
ANSWER_SECONDS = 5.0
"""How long the server may take to answer, and how often a silent connection is tried."""

_NOTICE_LOSS = (
    "tcp_keepalives_idle = 10",
    "tcp_keepalives_interval = 5",
    "tcp_keepalives_count = 3",
    "tcp_user_timeout = 25000",
)
"""Settings of a listening connection: the server ends it, with its lock, half a minute after its host was lost."""


def send(conn: Connection, message: Any, own_pid: int) -> int:
    """Send a message to all processes that listen; return how many others these are."""
    conn.execute(sa.select(sa.func.pg_notify(CHANNEL, json.dumps(message))))
    return int(conn.execute(sa.text(_OTHERS), {"own": own_pid}).scalar_one())


async def listen(url: str) -> AsyncGenerator[Any]:
    """Yield this connection's process at the server, then messages: the process counts as listening then.

    It ends where none comes: a message must be sent once the process is known.

    Raises:
        StoreUnavailable: the connection ended, or the server does not answer.
    """
    plain = sa.make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            conn = await psycopg.AsyncConnection.connect(plain, autocommit=True)
        async with conn:
            for setting in _NOTICE_LOSS:
                await _ask(conn, f"SET {setting}")
            await _ask(conn, f"LISTEN {CHANNEL}")
            yield conn.info.backend_pid
            first = [each async for each in conn.notifies(timeout=2 * ANSWER_SECONDS, stop_after=1)]
            if first:
                await _ask(conn, "SELECT pg_advisory_lock_shared({}, {})".format(*_LOCK))
            for notification in first:
                yield _message(notification.payload)
            while first:
                async for notification in conn.notifies(timeout=ANSWER_SECONDS):
                    yield _message(notification.payload)
                await _ask(conn, "SELECT 1")
    except (psycopg.Error, TimeoutError) as error:
        raise StoreUnavailable(f"no messages of other proxies: {error or 'the database does not answer'}") from error


def _message(payload: str) -> Any:
    try:
        return json.loads(payload)
    except ValueError:
        return payload  # of another program


async def _ask(conn: psycopg.AsyncConnection[Any], statement: str) -> None:
    async with asyncio.timeout(ANSWER_SECONDS):
        await conn.execute(statement.encode())
