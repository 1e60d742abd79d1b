"""Reloading a real vLLM under streams: clients see only a short pause, and every turn has its policy versions.

Versions are checked against `transformers` itself: a turn's tokens must have the logprobs of the version that its row
names, up to the token of the reload, and those of the next version after it.
"""

import asyncio
import collections
import contextlib
import dataclasses
import json
import re
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import APIError, AsyncOpenAI, OpenAI
from safetensors.torch import load_file, save_file
from support.checkpoints import Forward, copied, forward_of, with_probe, write_adapter, write_perturbed
from support.control_plane import ask, metric, policy, publish, publish_in_store, wait_for_status
from support.engines import RunningEngine, running_engine
from support.proxies import RunningProxy, StartProxy
from support.waiting import WAIT_SECONDS, wait_until
from support.weights_in_memory import note_transfers, weights_in_memory

from turnwise.default_models.small_model import SmallModelSpec, build_small_model
from turnwise.engine_plugin.channel import Channel, TransferFailed
from turnwise.store.turns import TurnView

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
"""Nats between the engine and `transformers`; both compute in float32."""
NUM_TOKENS = 128
MOST_RELOADS = 60
ATTENTION, WITH_HEAD = ("q_proj", "v_proj"), ("q_proj", "lm_head")
"""Layers that an adapter changes."""
TIED = "ignore:Model has `tie_word_embeddings=True`:UserWarning"
"""peft's warning, which concerns merged adapters; trainer/publish/merge.py does what it asks for."""
SIZES = [pytest.param(2, 8), pytest.param(60, 32, marks=pytest.mark.slow)]


GREEDY: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Which city?"}],
    "temperature": 0,
    "logprobs": True,
    "extra_body": {"return_token_ids": True, "ignore_eos": True},
}


def greedy_gap(proxy: RunningProxy, forward: Forward) -> float:
    with OpenAI(base_url=proxy.v1, api_key="none") as client:
        reply = client.chat.completions.create(model="small", max_completion_tokens=16, **GREEDY)
    assert reply.model == "small"
    return gap(reply, forward)


def gap(reply: Any, forward: Forward) -> float:
    """Return the largest |logprob difference| of a reply's tokens from the forward."""
    prompt, sampled = reply.prompt_token_ids, reply.choices[0].token_ids
    theirs = torch.tensor([entry.logprob for entry in reply.choices[0].logprobs.content])
    return float((forward(prompt + sampled, len(prompt)) - theirs).abs().max())


@dataclasses.dataclass
class Observed:
    silences: dict[int, list[tuple[float, float]]] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(list)
    )
    """For each client, start and end of each wait for the next event, on the monotonic clock."""
    num_calls: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


@contextlib.asynccontextmanager
async def streams(proxy: RunningProxy, count: int, watched: Observed):
    """Keep this many streams running while the block runs; each finishes its last call."""
    stop = asyncio.Event()
    async with AsyncOpenAI(base_url=proxy.v1, api_key="none", max_retries=0, timeout=WAIT_SECONDS) as client:

        async def agent(number: int) -> None:
            round_ = 0
            while not stop.is_set():
                session_client = client.with_options(base_url=proxy.session_v1(f"s{number}-{round_}"))
                await one_stream(session_client, number, watched)
                round_ += 1

        agents = [asyncio.create_task(agent(number)) for number in range(count)]
        try:
            yield
        finally:
            stop.set()
            await asyncio.gather(*agents)


async def one_stream(client: AsyncOpenAI, number: int, watched: Observed) -> None:
    watched.num_calls += 1
    last, finished = time.monotonic(), False
    try:
        async for chunk in await client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": f"Who is number {number}?"}],
            temperature=1.0,
            max_completion_tokens=NUM_TOKENS,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        ):
            now = time.monotonic()
            watched.silences[number].append((last, now))
            last = now
            finished = finished or any(choice.finish_reason for choice in chunk.choices)
        if not finished:
            watched.failures.append("cut")
    except (APIError, OSError) as error:
        watched.failures.append(repr(error))


def stalls(watched: Observed, reloads: list[tuple[float, float]]) -> list[float]:
    """Return, for each reload and client, the longest pause that overlaps the reload, in seconds."""
    return [
        max((b - a for a, b in silences if a < end and b > begin), default=0.0)
        for begin, end in reloads
        for silences in watched.silences.values()
    ]


@pytest.mark.parametrize("source", ["directory", "memory"])
@pytest.mark.parametrize(("num_reloads", "num_streams"), SIZES)
def test_no_stream_fails_during_reloads_and_every_token_has_the_version_that_its_turn_names(
    served, engine, tmp_path, num_reloads, num_streams, source
):
    watched, reloads, gaps = Observed(), [], []
    paths = {0: engine.model_dir}

    def publish_here(version: int, path: Path) -> None:
        if source == "directory":
            assert publish(served, path) == version
        else:
            trainer.hold(version, path)
            publish_in_store(served, version, tmp_path / "nowhere" / path.name)

    async def reload_all() -> None:
        async with streams(served, num_streams, watched):
            # On a busy machine, all running streams may end before an engine pauses: then there are more reloads.
            while len(reloads) < num_reloads or (not spanning_turns(served) and len(reloads) < MOST_RELOADS):
                version = len(reloads) + 1
                paths[version] = write_perturbed(engine.model_dir, tmp_path / f"v{version}", version)
                await asyncio.sleep(0.3)  # the pace of a trainer: streams start and end between reloads
                begin = time.monotonic()
                await asyncio.to_thread(publish_here, version, paths[version])
                await asyncio.to_thread(wait_for_status, served, version)
                reloads.append((begin, time.monotonic()))
                if version % max(1, num_reloads // 10) == 0:
                    gaps.append(await asyncio.to_thread(greedy_gap, served, forward_of(paths[version])))

    with weights_in_memory(served.database_url) as trainer:
        asyncio.run(reload_all())
    assert metric(served, "turnwise_weight_transfers_total", result="sent") == (
        len(reloads) if source == "memory" else 0
    )
    turns = [view for view in served.turns() if view.turn.sampling.get("temperature") == 1.0]
    counts = check_versions(turns, paths, limit=400)
    report(watched, reloads, gaps, counts)
    assert watched.failures == []
    assert len(turns) == watched.num_calls
    assert max(gaps) < TOLERANCE
    assert counts["spanning"] > 0, "no stream ran during a reload, so nothing was tested"


def is_spanning(view: TurnView) -> bool:
    return view.turn.policy_version_first != view.turn.policy_version_last


def spanning_turns(proxy: RunningProxy) -> list[TurnView]:
    return [view for view in proxy.turns() if is_spanning(view)]


def report(
    watched: Observed, reloads: list[tuple[float, float]], gaps: list[float], counts: collections.Counter
) -> None:
    seen = sorted(stalls(watched, reloads))
    p50, p99 = (seen[min(len(seen) - 1, int(len(seen) * q))] for q in (0.5, 0.99))
    print(
        f"\n{len(reloads)} reloads under streams: {watched.num_calls} calls, {len(watched.failures)} failed or cut; "
        f"stall p50 {p50 * 1000:.0f} ms, p99 {p99 * 1000:.0f} ms; publish to active "
        f"{statistics.median(end - begin for begin, end in reloads) * 1000:.0f} ms; "
        f"largest greedy gap {max(gaps):.2g} nats; {dict(counts)}"
    )


def check_versions(turns: list[TurnView], paths: dict[int, Path], limit: int) -> collections.Counter[str]:
    """Check each turn's tokens against the versions between its first and its last, in that order."""
    forwards: dict[int, Forward] = {}
    counts: collections.Counter[str] = collections.Counter()
    spanning = [view for view in turns if is_spanning(view)]
    others = [view for view in turns if view.turn.policy_version_first == view.turn.policy_version_last]
    for view in (spanning + others)[:limit]:
        first, last = view.turn.policy_version_first, view.turn.policy_version_last
        assert first <= last
        ids = np.concatenate([view.prompt_token_ids, view.turn.token_ids]).tolist()
        ours = torch.tensor(view.turn.logprobs.copy())
        fits = []
        for version in range(first, last + 1):
            forward = forwards.setdefault(version, forward_of(paths[version]) if version not in forwards else None)
            fits.append((forward(ids, view.turn.prompt_length) - ours).abs() < TOLERANCE)
        assert in_order(fits), (view.turn.turn_id, first, last, [fit.int().tolist() for fit in fits])
        assert fits[0][0], "the first token is of the first version"
        assert fits[-1][-1], "the last token is of the last version"
        counts["spanning" if first != last else "of one version"] += 1
        counts["tokens"] += len(ours)
    return counts


def in_order(fits: list[torch.Tensor]) -> bool:
    """Return whether the tokens split into one run per version, in order, that fits its version."""
    at, length = 0, len(fits[0])
    for fit in fits:
        while at < length and fit[at]:
            at += 1
    return at == length


def cut_off(model_dir: Path, place: Path) -> None:
    copied(model_dir, place, "config.json", "model.safetensors")
    weights = place / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def other_probe(model_dir: Path, place: Path) -> None:
    copied(model_dir, place, "config.json", "model.safetensors")
    probe = {"token_ids": [5, 6, 7, 8], "logprobs": [-0.1, -0.1, -0.1]}
    (place / "turnwise.json").write_text(json.dumps({"probe": probe}))


def nowhere(model_dir: Path, place: Path) -> None:
    del model_dir, place


BAD = {cut_off: "is not a whole safetensors file", other_probe: "from the checkpoint's own probe"}
"""Defects of a version, and the words of their errors; tests/unit/proxy/test_checkpoint.py has the others."""


def num_loads(engine: RunningEngine) -> int:
    return engine.log.read_text(errors="replace").count("POST /collective_rpc")


def test_a_bad_version_is_refused_before_the_engine_loads_it_and_serving_continues(served, engine, tmp_path):
    good = write_perturbed(engine.model_dir, tmp_path / "good", 1)
    version = publish(served, good)
    wait_for_status(served, version)
    forward = forward_of(good)
    watched = Observed()

    async def publish_bad_ones() -> None:
        async with streams(served, 4, watched):
            for number, (spoil, words) in enumerate(BAD.items(), start=version + 1):
                place = tmp_path / spoil.__name__
                spoil(engine.model_dir, place)
                loads = num_loads(engine)
                publish_in_store(served, number, place)
                failed = await asyncio.to_thread(wait_for_status, served, number, "failed")
                assert re.search(words, failed["error"]), failed["error"]
                assert num_loads(engine) == loads + (2 if spoil is other_probe else 0)
                assert await asyncio.to_thread(greedy_gap, served, forward) < TOLERANCE

    asyncio.run(publish_bad_ones())
    assert watched.failures == []
    assert policy(served, version)["status"] == "active"
    after = write_perturbed(engine.model_dir, tmp_path / "after", 2)
    wait_for_status(served, publish(served, with_probe(after, forward_of(after))))
    assert greedy_gap(served, forward_of(after)) < TOLERANCE


@pytest.mark.filterwarnings(TIED)
def test_adapters_are_swapped_between_calls_without_a_pause_and_unloaded_when_unused(served, engine, tmp_path):
    """Each version is an adapter with its own name; clients see only the model's name; a turn has one version.

    The second adapter also changes the output head, which is tied to the embeddings; these stay as they are.
    """
    adapters = {
        number: write_adapter(engine.model_dir, tmp_path / f"a{number}", number, targets=targets)
        for number, targets in {1: ATTENTION, 2: WITH_HEAD, 3: ATTENTION}.items()
    }
    for path in adapters.values():
        with_probe(path, forward_of(engine.model_dir, path))
    watched, loads = Observed(), num_loads(engine)

    async def load_all() -> None:
        async with streams(served, 6, watched):
            for number, path in adapters.items():
                await asyncio.sleep(0.3)  # streams start and end between reloads
                assert await asyncio.to_thread(publish, served, path, kind="lora") == number
                await asyncio.to_thread(wait_for_status, served, number)
                forward = forward_of(engine.model_dir, path)
                assert await asyncio.to_thread(greedy_gap, served, forward) < TOLERANCE

    asyncio.run(load_all())
    assert watched.failures == []
    assert num_loads(engine) == loads
    turns = [view for view in served.turns() if view.turn.sampling.get("temperature") == 1.0]
    assert {view.turn.model for view in turns} == {"small"}
    assert all(view.turn.policy_version_first == view.turn.policy_version_last for view in turns)
    forwards = {0: forward_of(engine.model_dir)}
    forwards |= {number: forward_of(engine.model_dir, path) for number, path in adapters.items()}
    for view in turns:
        ids = np.concatenate([view.prompt_token_ids, view.turn.token_ids]).tolist()
        ours = forwards[view.turn.policy_version_first](ids, view.turn.prompt_length)
        assert float((ours - torch.tensor(view.turn.logprobs.copy())).abs().max()) < TOLERANCE
    wait_until(
        lambda: [name.split("-")[:2] for name in models_of(engine)] == [["small"], ["policy", "v2"], ["policy", "v3"]],
        "the engine holds the two newest adapters alone",
    )
    ask(served.url, "/v1/policies/0/activate", {})
    wait_for_status(served, 0)
    assert greedy_gap(served, forwards[0]) < TOLERANCE


@pytest.fixture(params=["tied", "untied"])
def served_model(
    request: pytest.FixtureRequest, start_proxy: StartProxy, tmp_path: Path
) -> Iterator[tuple[RunningProxy, RunningEngine]]:
    """A proxy and its engine: the shared one, whose output head is its embeddings, or one with a head of its own."""
    if request.param == "tied":
        yield request.getfixturevalue("served"), request.getfixturevalue("engine")
        return
    model = build_small_model(tmp_path / "untied", SmallModelSpec(num_warm_up_steps=1))
    with running_engine(model, tmp_path / "engine.log") as own:
        proxy = start_proxy(own.url)
        wait_for_status(proxy, 0)
        yield proxy, own


@pytest.mark.filterwarnings(TIED)
def test_calls_in_one_batch_are_each_computed_with_their_own_adapter_or_with_none(served_model, tmp_path):
    """The engine's slots are full, and every step computes tokens of both adapters and of the model without one.

    One adapter changes the output head too.
    """
    served, engine = served_model
    forwards = {"small": forward_of(engine.model_dir)}
    for number, targets in {1: WITH_HEAD, 2: ATTENTION}.items():
        path = write_adapter(engine.model_dir, tmp_path / f"a{number}", number, targets=targets)
        assert publish(served, path, kind="lora") == number
        wait_for_status(served, number)
        forwards[models_of(engine)[-1]] = forward_of(engine.model_dir, path)

    async def sample_together() -> list[tuple[str, Any]]:
        async with AsyncOpenAI(base_url=f"{engine.url}/v1", api_key="none") as client:
            models = [*forwards] * 3
            calls = [client.chat.completions.create(model=each, max_completion_tokens=64, **GREEDY) for each in models]
            return list(zip(models, await asyncio.gather(*calls), strict=True))

    replies = asyncio.run(sample_together())
    assert [
        (model, gap(reply, forwards[model])) for model, reply in replies if gap(reply, forwards[model]) > TOLERANCE
    ] == []


def models_of(engine: RunningEngine) -> list[str]:
    return [model["id"] for model in ask(engine.url, "/v1/models")["data"]]


NOWHERE = Path("/nowhere/at/all")


def gap_of_engine(engine: RunningEngine, directory) -> float:
    """Return the largest |logprob difference| of the engine from `transformers` over a text of the engine's."""
    body = {"model": engine.model, "prompt": [40, 41, 42], "max_tokens": 16, "temperature": 0, "logprobs": 1}
    choice = ask(engine.url, "/v1/completions", body | {"return_token_ids": True, "ignore_eos": True})["choices"][0]
    expected = forward_of(directory)([40, 41, 42, *choice["token_ids"]], 3)
    return float((torch.tensor(choice["logprobs"]["token_logprobs"]) - expected).abs().max())


def test_versions_in_float32_and_bfloat16_are_served_as_they_were_sent(served, engine, tmp_path):
    first = write_perturbed(engine.model_dir, tmp_path / "v1", 1)
    second = write_perturbed(first, tmp_path / "v2", 2, noise=0.0)
    tensors = load_file(second / "model.safetensors")
    name = next(name for name in tensors if name.endswith("q_proj.weight"))
    tensors[name][:, 0] += 0.5  # one column of one layer
    save_file(tensors, second / "model.safetensors", {"format": "pt"})
    third = tmp_path / "v3"
    third.mkdir()
    (third / "config.json").write_text((second / "config.json").read_text())
    save_file({key: value.bfloat16() for key, value in tensors.items()}, third / "model.safetensors", {"format": "pt"})
    with weights_in_memory(served.database_url) as trainer:
        for version, directory in ((1, first), (2, second), (3, third)):
            trainer.hold(version, directory)
            publish_in_store(served, version, NOWHERE)
            wait_for_status(served, version)
            assert gap_of_engine(engine, directory) < TOLERANCE
    assert gap_of_engine(engine, first) > TOLERANCE
    assert metric(served, "turnwise_weight_transfers_total", result="sent") == 3


@pytest.mark.slow
@pytest.mark.usefixtures("base_weights")
def test_engines_that_pass_a_version_on_have_what_was_sent(engine, start_proxy, tmp_path, monkeypatch):
    numbers = note_transfers(monkeypatch)
    with contextlib.ExitStack() as running:
        others = [running.enter_context(running_engine(engine.model_dir, tmp_path / f"{n}.log")) for n in range(2)]
        further = [flag for each in others for flag in ("--engine", each.url)]
        proxy = start_proxy(engine.url, *further, "--holdout-share", "0")
        wait_for_status(proxy, 0)
        trainer = running.enter_context(weights_in_memory(proxy.database_url))
        directory = engine.model_dir
        for version in (1, 2):
            directory = write_perturbed(directory, tmp_path / f"v{version}", version)
            trainer.hold(version, directory)
            publish_in_store(proxy, version, NOWHERE)
            wait_for_status(proxy, version)
            assert max(gap_of_engine(each, directory) for each in (engine, *others)) < TOLERANCE
        assert metric(proxy, "turnwise_weight_transfers_total", result="sent") == 6
        assert numbers == [1, 2, 1, 2]
        proxy.kill()


def test_a_half_sent_version_leaves_the_last_good_one_served(served, engine, tmp_path, monkeypatch):
    good = write_perturbed(engine.model_dir, tmp_path / "v1", 1)
    wait_for_status(served, publish(served, good))

    def send_a_part(self: Channel, buffer: torch.Tensor, chunk_bytes: int) -> None:
        whole(self, buffer[: 5 * chunk_bytes], chunk_bytes)
        raise TransferFailed("the trainer ended")

    whole = Channel.broadcast
    monkeypatch.setattr(Channel, "broadcast", send_a_part)
    monkeypatch.setattr("trainer.features.transfers.server.CHUNK_BYTES", 1 << 16)
    with weights_in_memory(served.database_url) as trainer:
        trainer.hold(2, write_perturbed(engine.model_dir, tmp_path / "v2", 2))
        publish_in_store(served, 2, NOWHERE)
        assert "is not a directory" in wait_for_status(served, 2, "failed")["error"]
        assert policy(served, 1)["status"] == "active"
        assert gap_of_engine(engine, good) < TOLERANCE
        monkeypatch.undo()
        third = write_perturbed(engine.model_dir, tmp_path / "v3", 3)
        trainer.hold(3, third)
        publish_in_store(served, 3, NOWHERE)
        wait_for_status(served, 3)
        assert gap_of_engine(engine, third) < TOLERANCE
