"""An engine behind the proxy: publishing under streams, and throughput against the engine's own.

The engine is vLLM where it is installed, with random weights and a tokenizer that knows every id; otherwise the
stand-in, which shows the protocol and no speed.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import torch
import uvloop
from load import load
from rollouts import SIZES, write_model
from safetensors.torch import load_file
from turnwise_fake_engine.tokens import write_tokenizer

from trainer.features.transfers import HeldVersions
from trainer.features.transfers.server import WeightServer
from turnwise.engine_plugin import BACKEND
from turnwise.features import transfers
from turnwise.processes import guard
from turnwise.processes.engine_command import EngineSettings, build_command, has_plugin, packages_problem
from turnwise.processes.ports import free_port
from turnwise.processes.stack import command
from turnwise.processes.supervisor import is_ready, tail_of
from turnwise.store import versions
from turnwise.store.database import Database
from turnwise.types import PolicyStatus, PolicyVersion

START_SECONDS = 300.0
STOP_SECONDS = 10.0
ACTIVE_SECONDS = 60.0
MAX_TURNS = 16


@dataclass
class Watched:
    """What the streams of a run saw."""

    num_calls: int = 0
    failures: list[str] = field(default_factory=list)
    silences: list[tuple[float, float]] = field(default_factory=list)
    """Start and end of each wait for the next part of a reply."""


def measure_publish(directory: Path, *, is_small: bool, engine: str) -> dict[str, Any]:
    """Publish versions from memory under running streams."""
    num_updates, num_streams = (3, 4) if is_small else (50, 32)
    model = written_model(directory, is_small)
    with serving(directory, model, engine, Path("publish")) as (_, proxy_url, database, kind):
        weights = {name: value.bfloat16() for name, value in load_file(model / "model.safetensors").items()}
        server = WeightServer(HeldVersions())
        with database.write() as connection:
            transfers.announce_weights(connection, "gpu-check", server.url, datetime.now(UTC))
        watched, updates = Watched(), list[tuple[float, float]]()
        with streams(proxy_url, num_streams, watched):
            for version in range(1, num_updates + 1):
                next(iter(weights.values())).mul_(1.001)
                server.held.hold(version, weights, None)
                updates.append(publish(database, version))
        paused = [policy.reload_seconds for policy in listed(database) if policy.reload_seconds is not None]
        server.close()
    overlapping = [max(b - a for a, b in watched.silences if a < end and b > start) for start, end in updates]
    return {
        "engine": kind,
        "num_updates": num_updates,
        "weight_bytes": sum(value.nbytes for value in weights.values()),
        "publish_to_active_seconds": statistics.median(end - start for start, end in updates),
        "pause_seconds": statistics.median(paused),
        "stall_p99_seconds": sorted(overlapping)[int(0.99 * (len(overlapping) - 1))],
        "num_calls": watched.num_calls,
        "num_failed_calls": len(watched.failures),
        "failures": watched.failures[:3],
    }


def measure_proxy(directory: Path, *, is_small: bool, engine: str) -> dict[str, Any]:
    """Load the engine and the proxy with the same calls, alternately."""
    num_sessions, seconds = (8, 1.0) if is_small else (96, 20.0)
    model = written_model(directory, is_small)
    best = {"engine": 0.0, "proxy": 0.0}
    with serving(directory, model, engine, Path("proxy")) as (engine_url, proxy_url, _, kind):
        body = json.dumps(
            {
                "model": "check",
                "messages": [{"role": "user", "content": "Say something long."}],
                "temperature": 1.0,
                "max_tokens": 128,
                "ignore_eos": True,
            }
        ).encode()
        for _ in range(2):
            for name, url in (("engine", engine_url), ("proxy", proxy_url)):
                found = uvloop.run(load(f"{url}/v1/chat/completions", num_sessions, seconds, body=body))
                best[name] = max(best[name], found["calls"] / found["seconds"])
    return {
        "engine": kind,
        "num_sessions": num_sessions,
        "engine_requests_per_second": best["engine"],
        "proxy_requests_per_second": best["proxy"],
        "share_of_engine": best["proxy"] / best["engine"],
    }


def written_model(directory: Path, is_small: bool) -> Path:
    """Write a model with random weights and a tokenizer for each of its ids, once."""
    size = SIZES["small" if is_small else "0.6b"]
    place = directory / ("model-small" if is_small else "model-0.6b")
    if (place / "chat_template.jinja").is_file():
        return place
    write_tokenizer(place)
    tokenizer = json.loads((place / "tokenizer.json").read_text())
    known = {token["id"] for token in tokenizer["added_tokens"]} | set(tokenizer["model"]["vocab"].values())
    tokenizer["model"]["vocab"] |= {f"<{each}>": each for each in range(size.vocabulary) if each not in known}
    (place / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_model(place, size, MAX_TURNS)
    return place


@contextlib.contextmanager
def serving(directory: Path, model: Path, engine: str, name: Path) -> Iterator[tuple[str, str, Database, str]]:
    """Run an engine and a proxy; yield their URLs, the store, and which engine it is."""
    kind = engine
    if engine == "auto":
        can_run = importlib.util.find_spec("vllm") is not None and packages_problem() is None
        kind = "vllm" if can_run and torch.cuda.is_available() else "fake"
    place = directory / name
    place.mkdir(exist_ok=True)
    (place / "ledger.db").unlink(missing_ok=True)
    database = Database(f"sqlite:///{place.resolve()}/ledger.db")
    database.upgrade()
    engine_port, proxy_port = free_port(), free_port()
    engine_url, proxy_url = f"http://127.0.0.1:{engine_port}", f"http://127.0.0.1:{proxy_port}"
    argv = vllm_argv(model, engine_port) if kind == "vllm" else stand_in_argv(place, engine_port)
    flags = ["--engine", engine_url, "--port", str(proxy_port), "--database", f"sqlite:///{place.resolve()}/ledger.db"]
    with (
        running(argv, f"{engine_url}/health", place / "engine.log"),
        running(command("proxy", *flags), f"{proxy_url}/readyz", place / "proxy.log"),
    ):
        yield engine_url, proxy_url, database, kind
    database.close()


def vllm_argv(model: Path, port: int) -> list[str]:
    """Return the command of a vLLM that leaves memory to a trainer."""
    settings = EngineSettings(
        model=str(model.resolve()),
        port=port,
        served_model_name="check",
        gpu_memory=0.4 if torch.cuda.is_available() else None,
        max_model_len=4096 if torch.cuda.is_available() else None,
        weight_transfer=has_plugin(),
        tool_call_parser=None,
    )
    started = build_command(settings)
    return ["env", *(f"{name}={value}" for name, value in started.environment.items()), *started.argv]


def stand_in_argv(place: Path, port: int) -> list[str]:
    """Return the command of the stand-in."""
    script = place / "script.json"
    script.write_text(json.dumps({"model": "check", "weight_transfer": True, "pace_seconds": 0.002}))
    return command("fake-engine", "--port", str(port), "--script", str(script))


@contextlib.contextmanager
def running(argv: list[str], url: str, log: Path) -> Iterator[None]:
    """Run a server until the block ends, or until this process is killed because its part takes too long."""
    with log.open("wb") as output:
        process = subprocess.Popen(guard.guarded(argv, STOP_SECONDS), stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + START_SECONDS
        while not is_ready(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{argv[0]} did not start; the end of {log}:\n{tail_of(log)}")
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(3 * STOP_SECONDS)


def publish(database: Database, version: int) -> tuple[float, float]:
    """Publish a version from memory; return when it was published and when it became active."""
    started = time.monotonic()
    with database.write() as connection:
        versions.publish_version(connection, PolicyVersion(version=version, path=f"/in-memory-only/{version}"))
    while time.monotonic() < started + ACTIVE_SECONDS:
        found = next(policy for policy in listed(database) if policy.version == version)
        if found.status is PolicyStatus.ACTIVE:
            return started, time.monotonic()
        if found.status is PolicyStatus.FAILED:
            raise RuntimeError(f"version {version} was not served: {found.error}; is the backend {BACKEND!r} loaded?")
        time.sleep(0.005)
    raise RuntimeError(f"version {version} is not served after {ACTIVE_SECONDS:g} s")


def listed(database: Database) -> list[PolicyVersion]:
    """Return all versions."""
    with database.read() as connection:
        return versions.list_versions(connection, limit=1000)[0]


@contextlib.contextmanager
def streams(url: str, count: int, watched: Watched) -> Iterator[None]:
    """Keep streams running in a thread until the block ends, and end each with its reply."""
    stop = threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_stream_all(url, count, watched, stop)))
    thread.start()
    deadline = time.monotonic() + START_SECONDS
    while not watched.silences and time.monotonic() < deadline:
        time.sleep(0.01)
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def _stream_all(url: str, count: int, watched: Watched, stop: threading.Event) -> None:
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=httpx2.Limits(max_connections=None)) as client:

        async def agent(number: int) -> None:
            while not stop.is_set():
                await _stream(client, f"s{number}-{watched.num_calls}", watched)

        await asyncio.gather(*(agent(number) for number in range(count)))


async def _stream(client: httpx2.AsyncClient, session_id: str, watched: Watched) -> None:
    watched.num_calls += 1
    body = {
        "model": "check",
        "messages": [{"role": "user", "content": "Say something long, and then something longer."}],
        "stream": True,
        "max_tokens": 256,
        "ignore_eos": True,
        "temperature": 1.0,
    }
    last, ended = time.monotonic(), False
    try:
        async with client.stream("POST", f"/sessions/{session_id}/v1/chat/completions", json=body) as reply:
            reply.raise_for_status()
            async for part in reply.aiter_text():
                now = time.monotonic()
                watched.silences.append((last, now))
                last, ended = now, ended or "[DONE]" in part
        if not ended:
            watched.failures.append("cut off")
    except httpx2.HTTPError as error:
        watched.failures.append(repr(error))
