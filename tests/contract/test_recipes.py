"""Recipes and demos: agents that play and are trained, rated calls without a group, and what a model forgets."""

import asyncio
import json
import random
import re
import subprocess
from random import Random
from types import SimpleNamespace

import httpx2
import openai
import pytest
from openai import AsyncOpenAI
from support.control_plane import ask
from support.proxies import RunningProxy, running_proxy
from support.tiny_models import make_model
from support.trainer_ledger import settings_for, train
from support.waiting import WAIT_SECONDS
from turnwise_fake_engine import Reply, Rule, Script, ToolCall, running_fake_engine
from turnwise_fake_engine.tokens import VOCABULARY_SIZE

from examples.demos.plain_agent import load_module
from examples.demos.report import measure_forgetting
from examples.demos.trail_formats import FORMATS
from trainer.features import Settings
from turnwise.commands.recipe import find_recipe
from turnwise.default_models import trail
from turnwise.default_models.small_model import SmallModelSpec, build_small_model
from turnwise.features.page import overview
from turnwise.settings import load_settings
from turnwise.store import updates
from turnwise.store.database import Database
from turnwise.types import PolicyKind

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
    settings = load_settings(Settings, config=RECIPE / "recipe.toml", section="trainer", overrides=overrides)
    state = train(settings)
    assert (state.progress.policy_version, state.progress.num_groups, state.progress.num_sessions) == (1, 1, 2)


coding = load_module(str(find_recipe("coding") / "recipe.py"))
TESTS = "assert double(2) == 4\nassert double(-1) == -2"
RIGHT = "def double(x):\n    return 2 * x"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (RIGHT, ""),
        ("def double(x):\n    return x ** 2", "AssertionError"),
        ("def double(x):", "IndentationError"),
        ("import os\nos._exit(0)", "it ended before its tests"),
        ("raise SystemExit(0)", "it ended before its tests"),
        ("while True: pass", "it ended before its tests"),
        ("double = [0] * 10 ** 10", "MemoryError"),
        ("open('large', 'w').write('x' * 2 ** 22)", "File too large"),
        ("import socket\nsocket.create_connection(('192.0.2.1', 80), 5)", "unreachable"),
        ("import os\nassert not {'HOME', 'PATH'} & os.environ.keys()\n" + RIGHT, ""),
        ("double = '\0'", "null"),
    ],
)
def test_code_passes_its_tests_or_is_told_why_not(monkeypatch, code, expected):
    monkeypatch.setattr(coding, "SECONDS", WAIT_SECONDS)
    if "socket" in code and not coding.without_network():
        pytest.skip("this machine does not allow namespaces")
    found = coding.failure(code, TESTS)
    assert (expected in found) if expected else (found == "")


def test_each_expression_that_is_asked_for_passes_its_own_tests_and_no_other_does(monkeypatch):
    monkeypatch.setattr(coding, "SECONDS", WAIT_SECONDS)
    for split, expressions in coding.ONE_LINE.items():
        for words, expression in expressions.items():
            task = coding.make_task(Only(words), split, one_line=True)
            assert task["question"] == f"Return {words.format(n=3)}."
            assert coding.reward(task, f"def f(x): return {expression.format(n=3)}") == 1.0
            assert coding.reward(task, "def f(x): return x") == 0.0


class Only(Random):
    def __init__(self, words: str) -> None:
        super().__init__(0)
        self._words = words

    def choice(self, seq):
        return next(each for each in seq if each[0] == self._words)

    def randint(self, a, b):
        return 3


def test_an_agent_is_told_how_its_code_failed_and_tries_again():
    said: list[list[dict]] = []
    replies = iter(["I would double it.", "```python\nx = 1\n```", f"```python\n{RIGHT}\n```"])

    async def create(*, messages: list[dict], **_: object) -> SimpleNamespace:
        said.append([*messages])
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=next(replies)))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    task = {"question": "Double x.", "test": "assert double(2) == 4", "one_line": False}
    code = asyncio.run(coding.play(client, task, "a model"))
    assert coding.reward({"answer": TESTS}, code) == 1.0
    assert ["NameError" in messages[-1]["content"] for messages in said] == [False, True, True]


SHELL = FORMATS["shell_trail"]
BLOCK = re.compile(r"```mswea_bash_command\s*\n(.*?)\n```", re.DOTALL)
"""How mini-swe-agent's text mode finds the command of a reply."""
NUM_TASKS = 20


def conversations():
    for index in range(NUM_TASKS):
        task = trail.make_task("warm_up", index, 0)
        yield task, SHELL.warm_up.conversation(task, random.Random(index))


def test_the_warm_up_outputs_equal_those_of_a_real_shell(tmp_path):
    """Each command of a conversation, run in the task's directory, gives the message that follows it."""
    num_run = 0
    for task, messages in conversations():
        directory = tmp_path / task.task_id
        directory.mkdir()
        for name, content in SHELL.for_agent(task)["files"].items():
            (directory / name).write_text(content, encoding="utf-8")
        for reply, output in zip(messages[2::2], messages[3::2], strict=False):
            (command,) = BLOCK.findall(reply["content"])
            ran = subprocess.run(
                command,
                shell=True,
                cwd=directory,
                env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=False,
            )
            assert output["content"] == f"<returncode>{ran.returncode}</returncode>\n<output>\n{ran.stdout}</output>"
            num_run += 1
    assert num_run > NUM_TASKS


def test_the_commands_that_follow_each_boss_reach_the_answer_within_the_step_limit(tmp_path):
    for index in range(NUM_TASKS):
        task = trail.make_task("eval", index, 0)
        shown_task = SHELL.for_agent(task)
        name, steps = trail.first_person(task), 0
        while name in shown_task["files"]:
            name = shown_task["files"][name].split()[1]
            steps += 1
        assert name == shown_task["answer"]
        assert steps + 1 <= shown_task["step_limit"], "the submission is a separate step"
        assert shown_task["answer"] not in shown_task["question"]


SYSTEM = {"role": "system", "content": "You are the help desk of a shop."}


def serve_user(proxy: RunningProxy, number: int, reward: float) -> str:
    """Answer a user in a session without a group, rate it, and end it; return the note on training."""
    client = openai.OpenAI(base_url=proxy.session_v1(f"user-{number}"), api_key="none", max_retries=0)
    question = {"role": "user", "content": f"Where is order {number}?"}
    client.chat.completions.create(model="fake", messages=[SYSTEM, question], max_completion_tokens=8)
    lines = {"session_id": f"user-{number}", "value": reward}
    httpx2.post(f"{proxy.v1}/rewards", json=lines).raise_for_status()
    ended = httpx2.post(f"{proxy.v1}/sessions/user-{number}/end", json={}).raise_for_status()
    return str(ended.json()["training_note"])


def test_rated_calls_without_a_group_become_a_version(start_proxy, fake_engine, tmp_path):
    fake_engine.answer(Rule(reply=Reply(text="It left.")))
    proxy = start_proxy(fake_engine.url, database_url=f"sqlite:///{tmp_path}/ledger.db")
    for number in range(4):
        note = serve_user(proxy, number, reward=float(number % 2))
        assert note.startswith("It is a single session and waits for the trainer")
    model = make_model(tmp_path / "model", vocab_size=VOCABULARY_SIZE, max_position_embeddings=2048)
    # The stand-in's logprobs are invented, and two sessions fill the place of a group.
    changes = {"max_logprob_gap": 1e6, "groups_per_batch": 2, "singles_per_group": 2, "total_batches": 1}
    state = train(settings_for(tmp_path, model, **changes))
    assert (state.progress.policy_version, state.progress.num_sessions) == (1, 4)
    assert sorted(row.value for row in state.singles) == [0.0, 0.0, 1.0, 1.0]
    database = Database(proxy.database_url)
    with database.read() as connection:
        assert overview.count_rows(connection).groups == {"trained": 4}
        update = updates.last_update(connection)
    database.close()
    assert (update.metrics["num_single_sessions"], update.metrics["num_uniform_groups"]) == (4, 0)


TINY = [
    SmallModelSpec(hidden_size=32, intermediate_size=64, num_layers=1, num_warm_up_steps=3, seed=seed)
    for seed in (0, 1)
]


def test_a_model_has_forgotten_nothing_of_itself_and_another_model_differs(tmp_path):
    base, other = (build_small_model(tmp_path / str(spec.seed), spec) for spec in TINY)
    lines = tmp_path / "conversations.jsonl"
    messages = [{"role": "user", "content": "Which city?"}, {"role": "assistant", "content": "Oslo it is"}]
    lines.write_text(json.dumps({"messages": messages}) + "\n", encoding="utf-8")
    same = measure_forgetting(base, base, PolicyKind.FULL, lines)
    assert (same.num_conversations, same.loss_after) == (1, same.loss_before)
    assert same.kl == pytest.approx(0.0, abs=1e-6)
    assert measure_forgetting(base, other, PolicyKind.FULL, lines).kl > 1e-3
