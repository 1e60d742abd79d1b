"""The pretrained demo's task and its control."""

import asyncio
import importlib.util
from collections import Counter
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from examples.bosses import tasks as bosses
from examples.colour_words import tasks as colour_words
from examples.demos import driver
from examples.demos.plain_agent import NUM_SHUFFLED, ShuffledRewards
from examples.demos.real import RealDemoSettings
from examples.demos.report import Report, count_failures, margin
from examples.policies import tasks as preferences
from examples.secret import agent as secret_agent
from examples.secret import tasks as secret
from turnwise.errors import RolloutFailed
from turnwise.rollouts.results import RunResult

AGENT = Path("examples/bosses/agent.py")


class FollowingClient:
    """An OpenAI client whose model looks up whom it was told of last, and answers with a city."""

    def __init__(self) -> None:
        self.chat = SimpleNamespace(completions=self)
        self.num_calls = 0

    async def create(self, *, messages: list[dict], **_given: object) -> SimpleNamespace:
        self.num_calls += 1
        name = messages[-1]["content"].split('"')[1]
        command = "answer" if messages[-1]["content"].startswith("city=") else "lookup"
        message = SimpleNamespace(content=f'{command}("{name}")')
        return SimpleNamespace(choices=[SimpleNamespace(message=message)])


def test_names_and_cities_of_held_out_tasks_are_in_no_training_task_and_not_in_the_example():
    """Only the procedure can be learnt: a policy that knows the training names by heart gains nothing."""
    opening = AGENT.read_text(encoding="utf-8")
    for words in (bosses.NAMES, bosses.CITIES):
        assert not set(words["train"]) & set(words["eval"])
        for word in (*words["train"], *words["eval"]):
            assert f'"{word}"' not in opening


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('answer("{answer}")', 1.0),
        (' answer("{answer}")\n', 1.0),
        ("answer({answer})", 0.0),
        ('lookup("{answer}")', 0.0),
        ('The city is answer("{answer}")', 0.0),
        ('answer("Atlantis")', 0.0),
        ("", 0.0),
    ],
)
def test_only_the_command_with_the_right_city_is_rewarded(text, expected):
    task = bosses.make_task("eval", 0, seed=0)
    assert bosses.reward(task, text.replace("{answer}", task.answer)) == expected


def test_the_agent_solves_a_task_in_three_turns_with_a_model_that_follows():
    spec = importlib.util.spec_from_file_location("bosses_agent", AGENT)
    assert spec is not None
    assert spec.loader is not None
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    task, client = bosses.make_task("train", 3, seed=1), FollowingClient()
    assert bosses.reward(task, asyncio.run(agent.play(client, task.for_agent(), "a model"))) == 1.0
    assert client.num_calls == 3


def test_a_control_gives_every_reward_to_another_session():
    """After the first ones, each reward that goes in comes out once: only those still held are missing."""
    shuffled = ShuffledRewards(seed=0)
    first = [shuffled.exchange(-1.0) for _ in range(NUM_SHUFFLED)]
    given = [shuffled.exchange(float(number)) for number in range(1000)]
    assert set(first) == {-1.0}
    assert max(Counter(reward for reward in given if reward >= 0).values()) == 1
    assert given.count(-1.0) <= NUM_SHUFFLED
    assert given != sorted(given)


@pytest.mark.parametrize(
    ("control", "after", "is_met"), [(False, 0.92, True), (False, 0.35, False), (True, 0.02, True), (True, 0.92, False)]
)
def test_the_demo_must_learn_and_its_control_must_not(control, after, is_met):
    report = Report(title="", seed=0, reward_before=0.3, reward_after=after)
    assert (RealDemoSettings(control=control).missed(report) is None) is is_met


async def test_a_running_session_has_its_whole_time_when_the_training_is_ended(monkeypatch, tmp_path):
    """On a busy machine 60 seconds were too few: `turnwise run` was killed, and six calls of it were cut off."""
    given = []

    async def run_limited(argv, **options):
        given.append((argv, options))
        raise RolloutFailed("ended")

    monkeypatch.setattr(driver, "run_limited", run_limited)
    with pytest.raises(RolloutFailed):
        await driver.Demo(driver.DemoSettings(out=tmp_path), say=lambda *_: None)._play("training", "train")
    ((argv, options),) = given
    assert options["grace_seconds"] > float(argv[argv.index("--timeout") + 1])


def test_the_result_names_which_requests_failed_and_misses_the_target():
    report = Report(title="", seed=0, reward_after=1.0, failures={"aborted": 5, "overloaded": 1})
    assert "6 failed requests (5 aborted, 1 overloaded)" in report.lines(Path())[1]
    assert RealDemoSettings().missed(report) is not None


def test_a_call_that_reached_no_engine_is_one_failed_request():
    """The proxy counts it as a turn with this reason, and as a refusal with this code."""
    metrics = """
turnwise_turns_total{outcome="exact",reason=""} 9.0
turnwise_turns_total{outcome="error",reason="engine_unavailable"} 3.0
turnwise_turns_total{outcome="aborted",reason=""} 2.0
turnwise_refused_total{code="engine_unavailable"} 3.0
turnwise_refused_total{code="overloaded"} 1.0
turnwise_refused_total{code="invalid_request"} 0.0
"""
    samples = [each for family in text_string_to_metric_families(metrics) for each in family.samples]
    assert count_failures(samples) == {"engine_unavailable": 3, "aborted": 2, "overloaded": 1}


def test_each_answer_is_right_for_one_preference_alone():
    for index in range(20):
        task = preferences.make_task("eval", index, 0)
        for preference, answer in task.answers.items():
            rewards = {one: preferences.reward(task, f'The answer is "{answer}".', one) for one in task.answers}
            assert rewards == {one: float(one == preference) for one in task.answers}


@pytest.mark.parametrize(("num", "num_solved", "expected"), [(32, 32, 0.0598), (64, 18, 0.1122), (96, 27, 0.0913)])
def test_the_interval_of_a_held_out_reward_is_never_certain(num, num_solved, expected):
    """32 rewards of 1 and the ghosts 0 and 1: a deviation of 0.1715, Student's 2.035, 0.1715 / √34 · 2.035 = 0.0598."""
    assert margin([played(float(index < num_solved)) for index in range(num)]) == pytest.approx(expected, abs=2e-3)


def played(reward: float) -> RunResult:
    return RunResult(**{field.name: None for field in fields(RunResult)} | {"reward": reward})


def test_no_order_of_pictures_is_both_trained_and_held_out_and_a_control_shows_others_than_it_rewards():
    trained, held_out = (set(colour_words.sequences(split)) for split in ("train", "eval"))
    assert (len(trained), len(held_out), trained & held_out) == (8**3 - 128, 128, set())
    tasks = [
        [colour_words.make_task("train", index, 0, shuffled=shuffled) for index in range(99)]
        for shuffled in (False, True)
    ]
    assert [task.words for task in tasks[0]] == [task.words for task in tasks[1]]
    assert all(real.pictures != other.pictures for real, other in zip(*tasks, strict=True))
    task = tasks[0][0]
    assert [colour_words.reward(task, text) for text in (" ".join(task.words), " ".join(task.words[:2]), "")] == [
        1,
        0,
        0,
    ]


class SummingClient:
    """An OpenAI client whose model sums up the first or the second message, and answers with the names of a summary."""

    def __init__(self, summed_up: int) -> None:
        self.chat = SimpleNamespace(completions=self)
        self._summed_up = summed_up
        self.contexts: list[list[str]] = []

    async def create(self, *, messages: list[dict], **_given: object) -> SimpleNamespace:
        said = [message["content"] for message in messages if message["role"] == "user"]
        self.contexts.append(said)
        text = "OK."
        if said[-1] == secret_agent.COMPACTION_PROMPT:
            text = said[self._summed_up].splitlines()[0]
        elif said[-1] == secret.QUESTION:
            text = said[0].rpartition(": ")[2]
        usage = SimpleNamespace(total_tokens=40 * len(messages) // 2)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=text))], usage=usage)


@pytest.mark.parametrize(("summed_up", "earned"), [(0, 1.0), (1, 0.0)])
def test_only_a_summary_of_the_secret_earns_a_reward(summed_up, earned):
    """After 64 tokens the context is the summary, and the question has no other names before it."""
    task, client = secret.make_task("train", 0, 0), SummingClient(summed_up)
    text = asyncio.run(secret_agent.play(client, task.for_agent(), "m"))
    assert secret.reward(task, text) == earned
    first, others, question = task.messages
    assert client.contexts[:3] == [[first], [first, others], [first, others, secret_agent.COMPACTION_PROMPT]]
    (summary, last) = client.contexts[3]
    assert (summary, last) == (f"Summary: {(first, others)[summed_up].splitlines()[0]}", question)
    assert len(client.contexts) == 4
