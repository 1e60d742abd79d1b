"""A recipe with a stand-in engine and a tiny random model."""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI
from support.control_plane import ask
from support.proxies import running_proxy
from support.tiny_models import make_model
from support.trainer_ledger import train
from turnwise_fake_engine import Reply, Rule, Script, ToolCall, running_fake_engine
from turnwise_fake_engine.tokens import VOCABULARY_SIZE

from examples.demos.plain_agent import load_module
from trainer.settings import TrainerSettings
from turnwise.commands.recipe import find_recipe
from turnwise.settings import load_settings

RECIPE = find_recipe("gsm8k")
QUESTION = "Natalia sold 48 clips in April and half as many in May. How many altogether?"


def test_the_agent_of_a_recipe_plays_a_group_with_its_tool_and_the_recipe_trains_on_it(tmp_path):
    recipe, task = load_module(str(RECIPE / "recipe.py")), {"question": QUESTION, "answer": "72", "by_text": False}
    url = f"sqlite:///{tmp_path}/turnwise.db"

    async def played(base_url: str, api_key: str) -> str:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            return await recipe.play(client, task, "policy")

    with running_fake_engine(Script(model="policy")) as engine, running_proxy(engine.url, url, tmp_path) as proxy:
        for number, answer in enumerate(("72", "73")):
            session = {"session_id": f"s{number}", "task_id": "t", "run": number, "group_id": "g", "group_size": 2}
            created = ask(proxy.url, "/v1/sessions", session)
            engine.answer(Rule(reply=Reply(text=f"Altogether {answer}"), count=1))
            call = ToolCall(name="calculate", arguments={"expression": "48 + 48 / 2"})
            engine.answer(Rule(reply=Reply(tool_calls=[call]), count=1))
            reward = recipe.reward(task, asyncio.run(played(proxy.session_v1(f"s{number}"), created["api_key"])))
            assert reward == (1.0 if answer == "72" else 0.0)
            ask(proxy.url, f"/v1/sessions/s{number}/end", {"reward": reward})
        turns = proxy.turns("s0")
    assert [turn.turn.outcome for turn in turns] == ["exact", "exact"]
    model = make_model(tmp_path / "model", vocab_size=VOCABULARY_SIZE, max_position_embeddings=8192)
    overrides = {
        "database": url,
        "model": str(model),
        "policies_dir": str(tmp_path / "policies"),
        "total_batches": 1,
        "groups_per_batch": 1,
        "wait_seconds": 0.0,
        "max_logprob_gap": 1e9,  # the stand-in's logprobs are not this model's
        "progress": False,
        "num_threads": 1,
    }
    settings = load_settings(TrainerSettings, config=RECIPE / "recipe.toml", section="trainer", overrides=overrides)
    state = train(settings)
    assert (state.progress.policy_version, state.progress.num_groups, state.progress.num_sessions) == (1, 1, 2)
