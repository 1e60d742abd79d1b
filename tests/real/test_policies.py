"""Named policies on a real vLLM with fewer slots than adapters: every token is its policy's, and nobody else's changes.

Turns are checked against `transformers` itself: the stored logprobs are those of the adapter that the turn names.
"""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import AsyncOpenAI, OpenAI
from support.checkpoints import forward_of, write_adapter
from support.control_plane import ask, publish, wait_for_status
from support.engines import RunningEngine, running_engine
from support.proxies import RunningProxy
from support.running_trainer import GROUPS, play_group, running_trainer
from support.waiting import WAIT_SECONDS, wait_until

from turnwise.client import Client

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
"""Nats between the engine and `transformers`; both compute in float32."""
NUM_POLICIES = 6
NUM_CALLS = 48
AT_ONCE = 8


@pytest.fixture(scope="module")
def crowded(small_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningEngine]:
    log = tmp_path_factory.mktemp("crowded") / "engine.log"
    with running_engine(small_model_dir, log, "--max-loras", "2", "--max-cpu-loras", "3") as running:
        yield running


def test_more_policies_than_slots_sample_each_with_its_own_adapter_and_leave_each_other_as_they_are(
    crowded, start_proxy, tmp_path
):
    proxy = start_proxy(crowded.url)
    wait_for_status(proxy, 0)
    forwards = {0: forward_of(crowded.model_dir)}
    versions: dict[str, int] = {"default": 0}
    for number in range(1, NUM_POLICIES + 1):
        name = f"p{number}"
        ask(proxy.url, "/v1/policies", {"name": name})
        path = write_adapter(crowded.model_dir, tmp_path / f"a{number}", number)
        versions[name] = publish(proxy, path, kind="lora", policy=name)
        wait_for_status(proxy, versions[name])
        forwards[versions[name]] = forward_of(crowded.model_dir, path)
    order = random.Random(29).choices(sorted(versions), k=NUM_CALLS)

    async def call_at_random() -> None:
        places = asyncio.Semaphore(AT_ONCE)
        async with AsyncOpenAI(base_url=proxy.v1, api_key="none", max_retries=0) as client:

            async def call(number: int, name: str) -> None:
                question: Any = [{"role": "user", "content": f"Question {number}: which city?"}]
                async with places:
                    await client.chat.completions.create(model=name, messages=question, max_tokens=16)

            await asyncio.gather(*(call(number, name) for number, name in enumerate(order)))

    asyncio.run(call_at_random())
    turns = proxy.turns()
    assert sorted(view.turn.model for view in turns) == sorted(order)
    assert [view.turn.policy_version_first for view in turns] == [versions[view.turn.model] for view in turns]
    assert {(view.turn.outcome, view.turn.reason) for view in turns} == {("exact", None)}  # also vLLM's own record
    for view in turns:
        ids = np.concatenate([view.prompt_token_ids, view.turn.token_ids]).tolist()
        ours = forwards[view.turn.policy_version_first](ids, view.turn.prompt_length)
        assert float((ours - torch.tensor(view.turn.logprobs.copy())).abs().max()) < TOLERANCE

    before = logprobs(proxy, "p2")
    newer = publish(proxy, write_adapter(crowded.model_dir, tmp_path / "newer", 99), kind="lora", policy="p1")
    wait_for_status(proxy, newer)
    assert logprobs(proxy, "p2") == before
    ask(proxy.url, f"/v1/policies/{versions['p1']}/activate", {})
    wait_for_status(proxy, versions["p1"])
    assert logprobs(proxy, "p2") == before
    assert logprobs(proxy, "p1") != before

    ask(proxy.url, "/v1/policies", {"name": "trained"})
    untrained = logprobs(proxy, "trained")
    with Client(proxy.url) as client:
        for number in range(2 * GROUPS):
            play_group(client, number, policy="trained")

        def serves_second_version() -> bool:
            assert logprobs(proxy, "p2") == before
            return (newer + 2, "active") in {(each["version"], each["status"]) for each in client.policies("trained")}

        with running_trainer(proxy, crowded.model_dir, tmp_path, "--kind", "lora"):
            wait_until(serves_second_version, "the trainer's second version is active", WAIT_SECONDS)
    assert logprobs(proxy, "p2") == before
    assert logprobs(proxy, "trained") != untrained


def test_two_policies_of_one_session_extend_their_own_tokens_under_their_own_weights(crowded, start_proxy, tmp_path):
    """Also after one of them has a newer version. The last call hands the planner's conversation to the solver."""
    proxy = start_proxy(crowded.url)
    wait_for_status(proxy, 0)
    forwards, served = {}, {}
    for number, name in enumerate(("planner", "solver"), 20):
        ask(proxy.url, "/v1/policies", {"name": name})
        path = write_adapter(crowded.model_dir, tmp_path / name, number)
        served[name] = publish(proxy, path, kind="lora", policy=name)
        wait_for_status(proxy, served[name])
        forwards[served[name]] = forward_of(crowded.model_dir, path)
    said: dict[str, list[Any]] = {"planner": [], "solver": []}
    versions = []
    with OpenAI(base_url=proxy.session_v1("team"), api_key="none") as client:

        def call(name: str, said: list[Any], text: str) -> None:
            said.append({"role": "user", "content": text})
            reply = client.chat.completions.create(model=name, messages=said, max_tokens=24)
            said.append(reply.choices[0].message.model_dump(exclude_none=True))
            versions.append(served[name])

        for number in range(3):
            for name in ("planner", "solver"):
                call(name, said[name], f"Question {number}: which city?")
        path = write_adapter(crowded.model_dir, tmp_path / "newer", 30)
        served["planner"] = publish(proxy, path, kind="lora", policy="planner")
        wait_for_status(proxy, served["planner"])
        forwards[served["planner"]] = forward_of(crowded.model_dir, path)
        for name in ("planner", "solver"):
            call(name, said[name], "And now?")
        call("solver", list(said["planner"]), "Take over.")
    views = proxy.turns("team")
    assert [view.turn.policy_version_first for view in views] == versions
    planner, solver = 1, 2  # in the order of their creation
    assert [view.turn.policy_id for view in views] == [*[planner, solver] * 4, solver]
    parents = {view.turn.turn_id: view.turn.seq for view in views}
    assert [parents.get(view.turn.parent_turn_id or "") for view in views] == [None, None, 0, 1, 2, 3, 4, 5, None]
    assert [view.turn.reason for view in views] == [*[None] * 8, "policy_changed"]
    for view in views:
        ids = np.concatenate([view.prompt_token_ids, view.turn.token_ids]).tolist()
        ours = forwards[view.turn.policy_version_first](ids, view.turn.prompt_length)
        assert float((ours - torch.tensor(view.turn.logprobs.copy())).abs().max()) < TOLERANCE


def logprobs(proxy: RunningProxy, policy: str) -> list[list[float]]:
    found = []
    with OpenAI(base_url=proxy.v1, api_key="none") as client:
        for city in ("Oslo", "Rome", "Lima"):
            asked: Any = [{"role": "user", "content": f"Where is {city}?"}]
            reply = client.chat.completions.create(
                model=policy,
                messages=asked,
                temperature=0,
                max_tokens=24,
                logprobs=True,
                extra_body={"ignore_eos": True},
            )
            sampled = reply.choices[0].logprobs
            found.append([entry.logprob for entry in sampled.content or ()])
    return found
