"""Measure whether a `cache_salt` by version could replace clearing an engine's caches: `python bench/cache_salt.py`.

A real vLLM on the CPU serves a few agents with long prompts. While their calls run it loads other weights: as Turnwise
does, with the caches cleared; with a salt that names the version and the caches kept; and with neither. Then each agent
makes its next call, and after a load of the first weights, a call that repeats its last conversation. Printed are, for
each way, the pause, the wait of the running calls for their next token, the prompt tokens of the next calls that were
found in the cache, and the largest difference of logprobs from those that `transformers` computes with these weights.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx2
import torch
from servers import real_engine

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.checkpoints import Forward, forward_of, write_perturbed

from turnwise.default_models.small_model import SmallModelSpec, build_small_model

WAYS = {"cleared": (True, False), "salt by version": (False, True), "neither": (False, False)}
"""Whether a load clears the caches, and whether calls name the version as their salt."""


class Call:
    """A streamed completion of token ids."""

    def __init__(self, prompt: list[int], max_tokens: int, salt: str | None) -> None:
        self.prompt, self.ids, self.logprobs, self.at = prompt, list[int](), list[float](), list[float]()
        self.body = {
            "model": "small",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "logprobs": 0,
            "return_token_ids": True,
            "stream": True,
        } | ({} if salt is None else {"cache_salt": salt})

    async def run(self, client: httpx2.AsyncClient) -> None:
        async with client.stream("POST", "/v1/completions", json=self.body) as reply:
            reply.raise_for_status()
            async for line in reply.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                self.ids += choice["token_ids"]
                self.logprobs += choice["logprobs"]["token_logprobs"] if choice["logprobs"] else []
                self.at += [time.perf_counter()] * len(choice["token_ids"])

    def error(self, forward: Forward, first: int = 0) -> float:
        """Return the largest difference of the logprobs from the token `first` on."""
        theirs = forward([*self.prompt, *self.ids], len(self.prompt) + first)
        return float((theirs - torch.tensor(self.logprobs[first:])).abs().max())


class Bench:
    """An engine with two versions of its weights."""

    def __init__(self, client: httpx2.AsyncClient, directories: dict[str, Path]) -> None:
        self._client, self._directories = client, directories
        self._forwards = {name: forward_of(path) for name, path in directories.items()}

    async def load(self, name: str, *, clear: bool) -> float:
        """Load a version; return how long the engine was paused, seconds."""
        started = time.perf_counter()
        pause = {"mode": "keep", "clear_cache": str(clear).lower()}
        (await self._client.post("/pause", params=pause)).raise_for_status()
        path = {"weights_path": str(self._directories[name])}
        body = {"method": "reload_weights", "kwargs": path}
        (await self._client.post("/collective_rpc", json=body)).raise_for_status()
        (await self._client.post("/resume")).raise_for_status()
        return time.perf_counter() - started

    async def hits(self) -> float:
        """Return how many prompt tokens were found in the cache so far."""
        lines = (await self._client.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:prefix_cache_hits_total"))

    async def together(self, calls: list[Call]) -> float:
        before = await self.hits()
        await asyncio.gather(*(call.run(self._client) for call in calls))
        return await self.hits() - before

    async def measure(self, way: str, prompts: list[list[int]], num_tokens: int) -> dict[str, Any]:
        clear, salted = WAYS[way]

        def calls(given: list[list[int]], version: str, count: int) -> list[Call]:
            return [Call(each, count, version if salted else None) for each in given]

        await self.load("a", clear=True)
        running = calls(prompts, "a", num_tokens)
        tasks = asyncio.gather(*(call.run(self._client) for call in running))
        while min(len(call.ids) for call in running) < num_tokens // 4:  # noqa: ASYNC110  the streams wake nobody
            await asyncio.sleep(0.005)
        paused = await self.load("b", clear=clear)
        resumed = time.perf_counter()
        firsts = [len(call.ids) for call in running]
        await tasks
        waits = [min(at for at in call.at if at > resumed) - resumed for call in running]
        over = max(call.error(self._forwards["b"], first + 1) for call, first in zip(running, firsts, strict=True))
        longer = [[*call.prompt, *call.ids] for call in running]
        later = calls(longer, "b", 8)
        started = time.perf_counter()
        found = await self.together(later)
        seconds = time.perf_counter() - started
        await self.load("a", clear=clear)
        back = calls(longer, "a", 8)
        found_back = await self.together(back)
        return {
            "way": way,
            "pause_ms": round(1000 * paused),
            "next_token_ms": round(1000 * max(waits)),
            "error_of_running": over,
            "next_calls_ms": round(1000 * seconds),
            "cached_of_next": found / sum(map(len, longer)),
            "error_of_next": max(call.error(self._forwards["b"]) for call in later),
            "cached_after_roll_back": found_back / sum(map(len, longer)),
            "error_after_roll_back": max(call.error(self._forwards["a"]) for call in back),
        }


async def measure(arguments: argparse.Namespace, url: str, directories: dict[str, Path]) -> None:
    draw = random.Random(41)
    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        bench = Bench(client, directories)
        for number in range(arguments.rounds):
            for way in WAYS:
                prompts = [draw.choices(range(10, 500), k=arguments.prompt) for _ in range(arguments.agents)]
                print(json.dumps({"round": number} | await bench.measure(way, prompts, arguments.tokens)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=1200)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        first = build_small_model(directory / "a", SmallModelSpec(num_warm_up_steps=1))
        second = write_perturbed(first, directory / "b", 1)
        for file in first.iterdir():  # the tokenizer, for `transformers`
            if not (second / file.name).exists():
                (second / file.name).write_bytes(file.read_bytes())
        with real_engine(model=str(first), served_model_name="small") as (url, _):
            asyncio.run(measure(arguments, url, {"a": first, "b": second}))


if __name__ == "__main__":
    main()
