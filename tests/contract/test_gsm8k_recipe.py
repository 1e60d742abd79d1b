"""The GSM8K recipe: its agent and its settings, with a stand-in engine and a tiny random model."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from support.control_plane import ask
from support.proxies import running_proxy
from transformers import Qwen3Config, Qwen3ForCausalLM
from turnwise_fake_engine import Reply, Rule, Script, ToolCall, running_fake_engine
from turnwise_fake_engine.tokens import VOCABULARY_SIZE

from trainer.settings import TrainerSettings
from trainer.train import OnPolicyWorkflow
from turnwise.processes.engine_command import EngineSettings
from turnwise.processes.stack import UpSettings
from turnwise.rollouts.settings import RunSettings
from turnwise.settings import load_settings

RECIPE = Path(__file__).parents[2] / "examples" / "gsm8k_tool"
QUESTION = "Natalia sold 48 clips in April and half as many in May. How many altogether?"


def module(name: str) -> ModuleType:
    """Import one of the recipe's programs."""
    spec = importlib.util.spec_from_file_location(f"gsm8k_{name}", RECIPE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def test_every_setting_of_the_recipe_is_one_of_its_process():
    config = RECIPE / "turnwise.toml"
    kinds = {"up": UpSettings, "engine": EngineSettings, "trainer": TrainerSettings, "run": RunSettings}
    assert tomllib.loads(config.read_text()).keys() == kinds.keys()
    for section, kind in kinds.items():
        load_settings(kind, config=config, section=section, overrides={"model": "x"} if section == "engine" else {})


def test_a_line_of_gsm8k_becomes_a_task_with_the_number_behind_the_hashes():
    line = '{"question": "How much?", "answer": "1200 + 34 = <<1200+34=1234>>1234\\n#### 1,234"}'
    assert list(module("tasks").tasks_of([line], "train")) == [
        {"task_id": "train-0", "split": "train", "question": "How much?", "answer": "1234"}
    ]


@pytest.mark.parametrize(
    ("text", "number"), [("It is 7, so 1,234.", 1234.0), ("-2.5", -2.5), ("none", None), ("3 then 4", 4.0)]
)
def test_the_last_number_of_an_answer_counts(text, number):
    assert module("agent").last_number(text) == number


@pytest.mark.parametrize(("expression", "value"), [("(48 + 24) * 1", 72), ("-7 / 2", -3.5), ("2 - -2", 4)])
def test_the_calculator_calculates(expression, value):
    agent = module("agent")
    assert agent.value_of(agent.ast.parse(expression, mode="eval")) == value


def test_the_calculator_runs_no_code():
    agent = module("agent")
    with pytest.raises(ValueError, match="only numbers"):
        agent.value_of(agent.ast.parse("__import__('os').getcwd()", mode="eval"))


def test_the_agent_plays_a_group_with_its_tool_and_the_recipe_trains_on_it(tmp_path):
    """A right answer and a wrong one: rewards 1 and 0, one batch, one version."""
    agent = module("agent")
    url = f"sqlite:///{tmp_path}/turnwise.db"
    with running_fake_engine(Script(model="policy")) as engine, running_proxy(engine.url, url, tmp_path) as proxy:
        for number, answer in enumerate(("72", "73")):
            session = {"session_id": f"s{number}", "task_id": "t", "run": number, "group_id": "g", "group_size": 2}
            created = ask(proxy.url, "/v1/sessions", session)
            engine.answer(Rule(reply=Reply(text=f"Altogether {answer}"), count=1))
            call = ToolCall(name="calculate", arguments={"expression": "48 + 48 / 2"})
            engine.answer(Rule(reply=Reply(tool_calls=[call]), count=1))
            run = SimpleNamespace(base_url=proxy.session_v1(f"s{number}"), api_key=created["api_key"], model="policy")
            reward = asyncio.run(agent.play({"question": QUESTION, "answer": "72"}, run))
            assert reward == (1.0 if answer == "72" else 0.0)
            ask(proxy.url, f"/v1/sessions/s{number}/end", {"reward": reward})
        turns = proxy.turns("s0")
    assert [turn.turn.outcome for turn in turns] == ["exact", "exact"]
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=8192,
        )
    ).save_pretrained(tmp_path / "model")
    overrides = {
        "database": url,
        "model": str(tmp_path / "model"),
        "policies_dir": str(tmp_path / "policies"),
        "total_batches": 1,
        "wait_seconds": 0.0,
        "max_logprob_gap": 1e9,  # the stand-in's logprobs are not this model's
        "evaluate_every": None,
        "progress": False,
        "num_threads": 1,
    }
    settings = load_settings(TrainerSettings, config=RECIPE / "turnwise.toml", section="trainer", overrides=overrides)
    workflow = OnPolicyWorkflow.build_from_config(settings, enable_jit=False)
    state = workflow.learn(workflow.setup(0))
    workflow.close()
    assert (state.progress.policy_version, state.progress.num_groups, state.progress.num_sessions) == (1, 1, 2)
