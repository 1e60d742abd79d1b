"""Measure how long new weights take to reach N engines: `python bench/reloads.py --engines 1 2 16`.

Stand-ins take `--load-seconds` to load a directory. For each number of them a proxy starts: the medians, over versions,
of the time until all engines serve a version that was published; the time until all serve it that join at once; and the
longest pause of an engine. Each is also a ratio to that of the first number of engines in the same run. A version is
loaded into one engine alone before it is loaded into the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx2
import numpy as np
from safetensors.numpy import save_file
from servers import proxy_of
from turnwise_fake_engine import RunningFakeEngine, Script, running_fake_engine

DEADLINE_SECONDS = 300.0
POLL_SECONDS = 0.01


def wait(url: str, is_reached: Callable[[list[dict[str, object]]], bool]) -> float:
    """Wait until the proxy's report of its engines fulfils a condition; return how long that took, in seconds."""
    began = time.perf_counter()
    while not is_reached(found := httpx2.get(f"{url}/readyz").json()["engines"]):
        if time.perf_counter() - began > DEADLINE_SECONDS:
            raise RuntimeError(f"not within {DEADLINE_SECONDS:g} s; the engines are {found}")
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - began


def publish(url: str, directory: Path, version: int, engines: list[RunningFakeEngine]) -> tuple[float, float]:
    """Publish a version; return the seconds until all engines serve it, and those of the longest pause."""
    place = directory / f"v{version}"
    place.mkdir()
    (place / "config.json").write_text("{}")
    save_file({"weight": np.zeros(8, np.float32)}, place / "model.safetensors")
    httpx2.post(f"{url}/v1/policies", json={"path": str(place), "version": version}).raise_for_status()
    seconds = wait(url, lambda found: [each["policy_version"] for each in found] == [version] * len(engines))
    while True:  # until the pauses are recorded
        listed = httpx2.get(f"{url}/v1/policies", params={"limit": 100}).json()["data"]
        (status,) = (each for each in listed if each["version"] == version)
        if status["status"] == "active":
            return seconds, status["reload_seconds"]
        time.sleep(POLL_SECONDS)


def measure(number: int, load_seconds: float, versions: int) -> tuple[float, float, float]:
    """Return the medians of the time until a version is served and of its pause, and the time until all have joined."""
    with contextlib.ExitStack() as running:
        script = Script(load_seconds=load_seconds)
        started = [running.enter_context(running_fake_engine(script)) for _ in range(2 * number)]
        engines = started[:number]
        directory = Path(running.enter_context(tempfile.TemporaryDirectory()))
        named = directory / "engines.json"
        named.write_text(json.dumps([each.url for each in engines]))
        flags = ("--engines", f"file://{named}", "--holdout-share", "0", "--policy-tenant", "default")
        first = engines[0].url
        url, _ = running.enter_context(proxy_of(first, f"sqlite:///{directory}/bench.db", *flags))
        wait(url, lambda found: len(found) == number and all(each["ready"] for each in found))
        times = [publish(url, directory, version, engines) for version in range(1, versions + 2)][1:]
        named.write_text(json.dumps([each.url for each in started]))
        wait(url, lambda found: len(found) == 2 * number)  # the file was read
        joined = wait(url, lambda found: all(each["ready"] for each in found))
        newest = str(directory / f"v{versions + 1}")
        assert all(each.state.weights_path == newest for each in started)
    return statistics.median(one for one, _ in times), joined, statistics.median(paused for _, paused in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 16])
    parser.add_argument("--load-seconds", type=float, default=1.0)
    parser.add_argument("--versions", type=int, default=5)
    asked = parser.parse_args()
    first: tuple[float, float, float] | None = None
    for number in asked.engines:
        found = measure(number, asked.load_seconds, asked.versions)
        first = first or found
        served, joined, paused = (f"{one:.2f} s ({one / base:.2f} x)" for one, base in zip(found, first, strict=True))
        print(
            f"{number} engines: a version is served by all after {served}, {number} that join at once serve after "
            f"{joined}, an engine is paused for {paused} at most",
            flush=True,
        )


if __name__ == "__main__":
    main()
