"""A session with images through a real vLLM: captured, trained at the engine's logprobs, published and played again.

`TURNWISE_IMAGE_MODEL=Qwen3VL` before pytest takes another model.
"""

import os
import random
from typing import Any

import pytest
from support.engines import running_engine
from support.running_trainer import GROUP_SIZE, GROUPS, running_trainer, wait_for_version
from support.served_vision import make_served_model, picture, shown
from support.waiting import wait_until

from turnwise.client import Client
from turnwise.features.images import placed_images

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory):
    """A vLLM that serves a model with random weights."""
    directory = tmp_path_factory.mktemp("seeing")
    model = make_served_model(directory / "model", os.environ.get("TURNWISE_IMAGE_MODEL", "Idefics3"))
    with running_engine(model, directory / "engine.log") as running:
        yield running


def play(client: Client, number: int) -> None:
    """Play one group: two turns with images, the first of which every group has."""
    for run in range(GROUP_SIZE):
        session = client.create_session(
            session_id=f"g{number}-{run}", group_id=f"g{number}", group_size=GROUP_SIZE, task_id=f"t{number}"
        )
        calls = session.openai().chat.completions
        messages: list[Any] = []
        for pictures in (range(3), [10 * number + run + 3]):
            pictured = [shown(picture(seed)) for seed in pictures]
            messages.append({"role": "user", "content": [*pictured, {"type": "text", "text": "What is this?"}]})
            reply = calls.create(model="small", messages=messages, max_completion_tokens=8, temperature=1.0)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content or ""})
        session.reward(random.Random(f"{number}/{run}").random())
        session.end()


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_images_are_trained_at_the_engines_logprobs_and_published(seeing, start_proxy, tmp_path, kind):
    """Version 0 and version 1 sample; the engine has seen the first image before the load."""
    proxy = start_proxy(seeing.url)
    with Client(proxy.url) as client, running_trainer(proxy, seeing.model_dir, tmp_path, "--kind", kind):
        for version in range(2):
            for number in range(GROUPS):
                play(client, GROUPS * version + number)
            wait_for_version(client, version + 1, tmp_path / "trainer.log")
        # Engines get a version before its groups are acknowledged.
        wait_until(lambda: len(list(client.updates())) == 2, "both batches are acknowledged")
        gauges = [update["metrics"] for update in client.updates()]
    turns = [view.turn for view in proxy.turns()]
    assert {turn.outcome.value for turn in turns} == {"exact"}
    assert {len(placed_images(turn)) for turn in turns} == {3, 1}
    assert {turn.policy_version_first for turn in turns} == {0, 1}
    print(f"\nlargest gaps: {[each['logprob_gap_max'] for each in gauges]}")
    assert all(each["logprob_gap_max"] <= 1e-4 for each in gauges), gauges
    assert all(each["rows_shared"] for each in gauges)
