"""Requests to the address at which a trainer hands out weights."""

from __future__ import annotations

import asyncio
import logging

import orjson

from proxy.engines.answers import Disconnected
from proxy.engines.http_client import HttpClient
from turnwise.types import Json

log = logging.getLogger(__name__)

CONNECT_SECONDS = 2.0
ANSWER_SECONDS = 10.0
"""How long a trainer may take to answer, unless it is asked to wait for a transfer."""


async def ask_trainer(url: str, method: str, path: str, body: Json, seconds: float) -> Json | None:
    """Return a trainer's answer; None if it refuses, or does not answer."""
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
        http.close()
    return found if answer.status == 200 else None
