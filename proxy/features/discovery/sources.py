"""The readers of `engines`: each returns the addresses that its source names now."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from proxy.engines.engine import CONNECT_SECONDS
from proxy.engines.http_client import Access, Disconnected, HttpClient
from proxy.settings import is_http_url
from turnwise.errors import SettingsError

READ_SECONDS = 10.0
MOST_ENGINES = 1024
MOST_BYTES = 2**20
WORKERS = "/v1/rl/workers"
OK = 200
MOST_SHOWN = 100

Read = Callable[[], Coroutine[Any, Any, list[str]]]


def reader(source: str) -> Read:
    """Return what reads a source; it raises `SettingsError` where that names no engines, or does not answer."""
    parts = urlsplit(source)
    if parts.scheme == "file":
        return lambda: _within(asyncio.to_thread(_read_file, Path(parts.netloc + parts.path)), source)
    if parts.scheme == "dns":
        assert parts.hostname is not None
        assert parts.port is not None
        host, port = parts.hostname, parts.port
        return lambda: _within(_resolve(host, port), source)
    address = source.removeprefix("dynamo+")
    return lambda: _within(_ask_dynamo(address), source)


async def _within(reading: Coroutine[Any, Any, list[str]], source: str) -> list[str]:
    try:
        async with asyncio.timeout(READ_SECONDS):
            found = await reading
    except (OSError, TimeoutError, Disconnected, ValueError, TypeError) as error:
        raise SettingsError(f"engines={source!r} cannot be read ({str(error) or type(error).__name__})") from error
    wrong = [each for each in found if not (isinstance(each, str) and is_http_url(each))]
    if wrong or not found or len(found) > MOST_ENGINES:
        what = f"{wrong[0]!r}, which is no URL of an engine" if wrong else f"{len(found)} engines"
        raise SettingsError(f"engines={source!r} names {what}")
    return list(dict.fromkeys(each.rstrip("/") for each in found))


def _read_file(path: Path) -> list[str]:
    with path.open("rb") as file:
        text = file.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_BYTES} bytes")
    return _addresses(text, "url")


async def _resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(address[0]) for *_, address in found})
    return [f"http://[{each}]:{port}" if ":" in each else f"http://{each}:{port}" for each in hosts]


async def _ask_dynamo(address: str) -> list[str]:
    client = HttpClient(
        address.rstrip("/"), connect_seconds=CONNECT_SECONDS, silence_seconds=READ_SECONDS, access=Access()
    )
    try:
        with await client.request("GET", WORKERS, b"") as answer:
            body, status = await answer.read(MOST_BYTES), answer.status
    finally:
        await client.close()
    if status != OK:
        raise ValueError(f"{WORKERS} answers {status}")
    return _addresses(body, "system_url")


def _addresses(text: bytes, key: str) -> list[str]:
    """Return the addresses of a list of texts or objects, or of one in an object under `engines` or `workers`."""
    try:
        document = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON: {error}") from error
    if isinstance(document, dict):
        document = document.get("workers", document.get("engines"))
    if not isinstance(document, list):
        raise TypeError('it is no JSON list of URLs, such as ["http://10.0.0.1:8000"]')
    without = [each for each in document if isinstance(each, dict) and key not in each]
    if without:
        raise ValueError(f"{str(without[0])[:MOST_SHOWN]} has no {key!r}")
    return [each[key] if isinstance(each, dict) else each for each in document]
