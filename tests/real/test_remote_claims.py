"""TRL as the trainer: the example claims a real engine's sessions over HTTP, and the engine serves what it trained."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.proxies import running_proxy
from support.waiting import WAIT_SECONDS, wait_until
from transformers import AutoModelForCausalLM

from turnwise.client import Client

pytestmark = pytest.mark.engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "trl_claims" / "train.py"
NUM_SESSIONS, GROUP_SIZE, RATE = 16, 4, 1e-3


def test_trl_trains_from_claims_and_the_engine_serves_its_versions(engine, tmp_path):
    """Each second reply is rewarded; the rewarded ones become likelier than the others in what TRL publishes."""
    with running_proxy(engine.url, f"sqlite:///{tmp_path}/turnwise.db", tmp_path) as proxy, Client(proxy.url) as client:
        for number in range(NUM_SESSIONS):
            group = f"g{number // GROUP_SIZE}"
            session = client.create_session(task_id=group, group_id=group, group_size=GROUP_SIZE)
            asked = {"model": "small", "messages": [{"role": "user", "content": f"Which city, {group}?"}]}
            session.openai().chat.completions.create(**asked, max_completion_tokens=8, extra_body={"ignore_eos": True})
            session.end(reward=float(number % 2))
        out = tmp_path / "trl"
        command = [
            sys.executable,
            EXAMPLE,
            engine.model_dir,
            out,
            "--url",
            proxy.url,
            "--updates",
            "1",
            "--rate",
            str(RATE),
        ]
        subprocess.run(command, check=True, timeout=WAIT_SECONDS * 4)
        wait_until(
            lambda: [each["version"] for each in client.policies() if each["status"] == "active"] == [1],
            "the engine serves what TRL published",
        )
        chains = [*client.experiences(merge="chain")]
        (update,) = client.updates()
        assert (update["num_sessions"], update["num_tokens"], update["policy_version"]) == (NUM_SESSIONS, 128, 1)
        assert {each["trained_in"][0]["update_id"] for each in chains} == {update["update_id"]}
        session = client.create_session()
        session.openai().chat.completions.create(**asked, max_completion_tokens=8)
        assert [turn["policy_version_first"] for turn in session.turns()] == [1]
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (engine.model_dir, out / "v000001"))
    assert gain(after, chains) > gain(before, chains)


def gain(model, chains):
    """Return the mean over tokens of advantage times log-probability, whose slope TRL's loss follows at its start."""
    total = 0.0
    for chain in chains:
        tokens = torch.tensor([chain["tokens"]])
        with torch.no_grad():
            logprobs = model(tokens).logits.log_softmax(-1)[0, :-1].gather(1, tokens[0, 1:, None])[:, 0]
        total += chain["advantage"][0] * float(logprobs[chain["prompt_length"] - 1 :].sum())
    return total
