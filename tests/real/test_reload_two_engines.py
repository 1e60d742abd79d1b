"""Two real vLLMs behind one proxy: one is killed during a reload, restarts, and gets the active version.

A relay before the engine that is killed holds the request that loads the version, so that the reload cannot end before.
Calls in flight to the killed engine end with an error; all others are served, by weights that `transformers` confirms.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from chaos.relay import Relay
from openai import APIError, AsyncOpenAI
from support.checkpoints import Forward, forward_of, write_perturbed
from support.control_plane import ask, publish, versions_of_engines
from support.engines import RunningEngine, _end_group, _wait_healthy, load_own_weights
from support.ports import free_port
from support.proxies import RunningProxy, StartProxy
from support.waiting import wait_until

from turnwise.processes.engine_command import EngineSettings, build_command
from turnwise.types import Outcome

pytestmark = [pytest.mark.engine, pytest.mark.slow]

TOLERANCE = 1e-3
NUM_STREAMS = 8
STREAMED = b"chat.completion.chunk"
"""A chunk of a stream on its way from the engine."""
LOAD = b"POST /collective_rpc"
"""The request that makes an engine read a version's weights."""


@contextlib.contextmanager
def running_vllm(model_dir: Path, log: Path, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """A separate vLLM for this test, with its original weights."""
    settings = EngineSettings(model=str(model_dir), port=port, served_model_name="small")
    command = build_command(settings, gpu=False)
    assignments = [f"{name}={value}" for name, value in command.environment.items()]
    with log.open("ab") as output:
        process = subprocess.Popen(
            ["env", *assignments, *command.argv], stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        _wait_healthy(f"http://127.0.0.1:{port}", process, log)
        yield process
    finally:
        _end_group(process)


def wait_for_engines(proxy: RunningProxy, wanted: dict[str, int]) -> None:
    wait_until(lambda: versions_of_engines(proxy) == wanted, f"exactly these engines get calls: {wanted}")


def greedy_gap(engine_url: str, forward: Forward) -> float:
    """Ask an engine itself and return the largest |logprob difference| from the forward."""
    body = {
        "model": "small",
        "messages": [{"role": "user", "content": "Which city?"}],
        "temperature": 0,
        "max_completion_tokens": 16,
        "logprobs": True,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    reply = ask(engine_url, "/v1/chat/completions", body)
    prompt, choice = reply["prompt_token_ids"], reply["choices"][0]
    theirs = torch.tensor([entry["logprob"] for entry in choice["logprobs"]["content"]])
    return float((forward(prompt + choice["token_ids"], len(prompt)) - theirs).abs().max())


@dataclasses.dataclass
class Observed:
    """Replies and errors that the clients observed."""

    num_whole: int = 0
    errors: list[str] = dataclasses.field(default_factory=list)


async def stream_until(stop: asyncio.Event, proxy: RunningProxy, number: int, seen: Observed) -> None:
    async with AsyncOpenAI(base_url=proxy.v1, api_key="none", max_retries=0, timeout=60) as client:
        count = 0
        while not stop.is_set():
            count += 1
            session_client = client.with_options(base_url=proxy.session_v1(f"s{number}-{count}"))
            try:
                finished = False
                async for chunk in await session_client.chat.completions.create(
                    model="small",
                    messages=[{"role": "user", "content": f"Who is number {number}?"}],
                    max_completion_tokens=48,
                    stream=True,
                    extra_body={"ignore_eos": True},
                ):
                    finished = finished or any(choice.finish_reason for choice in chunk.choices)
                seen.num_whole += finished
                if not finished:
                    seen.errors.append("cut without an error")
            except APIError as error:
                seen.errors.append(str(error))


def test_an_engine_killed_during_a_reload_is_taken_out_and_gets_the_active_version_when_it_returns(
    engine: RunningEngine, start_proxy: StartProxy, small_model_dir: Path, tmp_path: Path
):
    """The other loads the version, or keeps the last; no client hangs; the returned engine serves the active one."""
    port, relay_port = free_port(), free_port()
    other_url = f"http://127.0.0.1:{relay_port}"
    seen, log = Observed(), tmp_path / "other.log"
    paths = {number: write_perturbed(small_model_dir, tmp_path / f"v{number}", number) for number in (1, 2, 3)}

    def publish_version(number: int) -> None:
        publish(proxy, paths[number], version=number)

    async def reload_and_kill(process: subprocess.Popen[bytes], relay: Relay) -> None:
        stop = asyncio.Event()
        agents = [asyncio.create_task(stream_until(stop, proxy, number, seen)) for number in range(NUM_STREAMS)]
        publish_version(1)
        await asyncio.to_thread(wait_for_engines, proxy, {other_url: 1, engine.url: 1})
        await asyncio.to_thread(wait_until, lambda: seen.num_whole >= 3 * NUM_STREAMS, "each stream ended thrice")
        assert seen.errors == []
        relay.hold_after(STREAMED)
        await asyncio.to_thread(wait_until, lambda: relay.held[STREAMED], "a stream is on the engine")
        relay.hold_after(LOAD)
        publish_version(2)
        await asyncio.to_thread(wait_until, lambda: relay.held[LOAD], "the engine is to load the version")
        os.killpg(process.pid, signal.SIGKILL)
        relay.close()
        await asyncio.to_thread(wait_for_engines, proxy, {engine.url: 1})
        num_whole = seen.num_whole
        await asyncio.to_thread(wait_until, lambda: seen.num_whole > num_whole + NUM_STREAMS, "the other engine serves")
        stop.set()
        await asyncio.gather(*agents)

    with running_vllm(small_model_dir, log, port) as process:
        # The second engine is named first: it tries each version first, and it is the one that is killed.
        relay = Relay(port, relay_port)
        proxy = start_proxy(other_url, "--engine", engine.url)
        wait_for_engines(proxy, {other_url: 0, engine.url: 0})
        asyncio.run(reload_and_kill(process, relay))
    assert seen.errors, "no call was on its way to the engine that died, so nothing was tested"
    outcomes = [view.turn.outcome for view in proxy.turns()]
    counts = collections.Counter(outcome.value for outcome in outcomes)
    print(
        f"\n{seen.num_whole} whole, {len(seen.errors)} ended with an error: {sorted(set(seen.errors))}; {dict(counts)}"
    )
    assert len(seen.errors) <= NUM_STREAMS
    assert all("retry" in error for error in seen.errors)
    assert outcomes.count(Outcome.EXACT) == seen.num_whole
    status = {each["version"]: each["status"] for each in ask(proxy.url, "/v1/policies")["data"]}
    assert status == {1: "active", 2: "failed"}
    assert greedy_gap(engine.url, forward_of(paths[1])) < TOLERANCE
    with running_vllm(small_model_dir, log, port), contextlib.closing(Relay(port, relay_port)):
        wait_for_engines(proxy, {other_url: 1, engine.url: 1})
        assert greedy_gap(other_url, forward_of(paths[1])) < TOLERANCE
        publish_version(3)
        wait_for_engines(proxy, {other_url: 3, engine.url: 3})
        for url in (other_url, engine.url):
            assert greedy_gap(url, forward_of(paths[3])) < TOLERANCE
        proxy.kill()
    load_own_weights(engine)
