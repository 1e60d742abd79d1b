"""The recipes: their settings, tasks, agents and graders, with a model that knows the answer and one that does not."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from examples.demos.plain_agent import load_module
from examples.demos.recipe import RecipeDemo, RecipeSettings, RecipeTask, make_task
from examples.demos.report import Report
from trainer.features import Settings
from turnwise.commands.recipe import find_recipe, recipes
from turnwise.errors import SettingsError
from turnwise.processes.engine_command import EngineSettings
from turnwise.settings import load_settings

SIZES = [(name, size) for name in recipes() for size in ("recipe", "small")]


def settings_of(name: str, size: str) -> RecipeSettings:
    file = find_recipe(name) / f"{size}.toml"
    load_settings(Settings, config=file, section="trainer", overrides={"model": "x", "policies_dir": "x"})
    load_settings(EngineSettings, config=file, section="engine", overrides={"model": "x"})
    overrides = {"agent": str(file.with_name("recipe.py"))}
    return load_settings(RecipeSettings, config=file, section="demo", overrides=overrides)


def module_of(name: str) -> Any:
    return load_module(str(find_recipe(name) / "recipe.py"))


def task_of(name: str, size: str, split: str, index: int) -> RecipeTask:
    settings = settings_of(name, size)
    return make_task(split, index, 0, file=str(settings.agent), options=settings.options)


class Saying:
    """An OpenAI client whose model gives these replies, one a call: a text, or name and argument of a tool call."""

    def __init__(self, *replies: str | tuple[str, dict]) -> None:
        self._replies = iter(replies)
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **_given: object) -> SimpleNamespace:
        reply = next(self._replies)
        message = {"role": "assistant", "content": reply}
        if not isinstance(reply, str):
            function = {"name": reply[0], "arguments": json.dumps(reply[1])}
            message = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
        return SimpleNamespace(choices=[SimpleNamespace(message=ChatCompletionMessage(**message))])


def reward_of(name: str, task: dict, replies: list) -> float:
    module = module_of(name)
    return module.reward(task, asyncio.run(module.play(Saying(*replies), task, "a model")))


@pytest.mark.parametrize(("name", "size"), SIZES)
def test_a_recipe_makes_the_same_tasks_again_and_held_out_ones_of_other_words(name, size, tmp_path, monkeypatch):
    if size == "recipe" and name in ("gsm8k", "coding"):
        (tmp_path / settings_of(name, size).options["directory"]).mkdir()
        for file in ("train", "test"):
            lines = [
                json.dumps({"question": f"{file} {each}?", "answer": f"#### {each}"})
                if name == "gsm8k"
                else json.dumps({"text": f"{file} {each}?", "test_list": [f"assert f() == {each}", "assert g()"]})
                for each in range(99)
            ]
            (tmp_path / settings_of(name, size).options["directory"] / f"{file}.jsonl").write_text("\n".join(lines))
        monkeypatch.chdir(tmp_path)
    train, held_out = task_of(name, size, "train", 5), task_of(name, size, "eval", 5)
    assert train == task_of(name, size, "train", 5) != task_of(name, size, "train", 6)
    assert "answer" not in train.for_agent()
    assert "answer" in train.fields
    assert train.task_id != held_out.task_id


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("reverse-text", "WORDS"),
        ("alphabet-sort", "NAMES"),
        ("shop", "ITEMS"),
        ("wordle", "WORDS"),
        ("wordle", "COLOURS"),
        ("coding", "ONE_LINE"),
    ],
)
def test_no_word_of_a_held_out_task_is_in_a_training_task(name, words):
    """For code the words are whole questions."""
    splits = {
        split: set(text.split() if isinstance(text, str) else text)
        for split, text in getattr(module_of(name), words).items()
    }
    assert splits["train"].isdisjoint(splits["eval"])


REVERSED = "<reversed_text>cba fed</reversed_text>"


@pytest.mark.parametrize(
    ("fields", "reply", "expected"),
    [
        ({"unit": "character", "answer": "cba fed"}, REVERSED, 1.0),
        ({"unit": "character", "answer": "cba fed"}, f"Sure:\n{REVERSED}\n", 1.0),
        ({"unit": "character", "answer": "cba fed"}, "cba fed", 0.0),
        # 4 of 7 and 4 characters match: 2 × 4 / 11
        ({"unit": "character", "answer": "cba fed"}, "<reversed_text>cba </reversed_text>", 6 / 10),
        ({"unit": "word", "answer": '"c" "b" "a"'}, '"c" "b" "a"', 1.0),
        ({"unit": "word", "answer": '"c" "b" "a"'}, "c b a", 0.0),
        # one word keeps its place: 2 × 1 / 6
        ({"unit": "word", "answer": '"c" "b" "a"'}, '"a" "b" "c"', 1 / 3),
        ({"unit": "word", "answer": '"c" "b" "a"'}, "", 0.0),
    ],
)
def test_the_reward_of_reversed_text_is_the_share_that_matches(fields, reply, expected):
    assert module_of("reverse-text").reward(fields, reply) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (["<sorted>\nAnn\nZoe\n</sorted>", "<sorted>\nAnn\nBob\nZoe\n</sorted>"], 1.0),
        (["Here: <sorted>Ann\n  Zoe</sorted>.", "<sorted>Ann\nBob\nZoe</sorted>"], 1.0),
        # the second list keeps the order of arrival: two of three names match, (1 + 2/3) / 2 to the power of 8
        (["<sorted>Ann\nZoe</sorted>", "<sorted>Ann\nZoe\nBob</sorted>"], (5 / 6) ** 8),
        (["<sorted>Ann\nZoe</sorted>", "Ann, Bob, Zoe"], 0.5**8),
        (["<sorted>Ann\nZoe</sorted>"], 0.0),
    ],
)
def test_the_reward_of_sorted_names_is_the_eighth_power_of_the_similarity(replies, expected):
    module = module_of("alphabet-sort")
    task = {"opening": [], "turns": ["Zoe\nAnn", "Bob"], "answer": ["Ann\nZoe", "Ann\nBob\nZoe"], "quoted": False}
    if len(replies) == len(task["turns"]):
        played = asyncio.run(module.play(Saying(*replies), task, "a model"))
    else:
        played = f'["{replies[0][:5]}"]'
    assert module.reward(task, played) == pytest.approx(expected)


@pytest.mark.parametrize(("reply", "expected"), [('"Ann" "Zoe"\n', 1.0), ('"Zoe" "Ann"', 0.0), ("Ann Zoe", 0.0)])
def test_two_quoted_names_are_in_order_or_not(reply, expected):
    task = {"opening": [], "turns": ['"Zoe" "Ann"'], "answer": ['"Ann" "Zoe"'], "quoted": True}
    assert reward_of("alphabet-sort", task, [reply]) == expected


@pytest.mark.parametrize(
    ("state", "replies", "expected"),
    [
        ("packed", [("look_up", "mug"), ("cancel", "mug"), "It is cancelled."], 1.0),
        ("delivered", [("look_up", "mug"), ("refund", "mug"), "It is refunded."], 1.0),
        ("delivered", [("look_up", "mug"), ("cancel", "mug"), "It is cancelled."], 0.0),
        ("travelling", [("look_up", "mug"), "It is on its way."], 1.0),
        ("packed", [("look_up", "mug"), "I would cancel it."], 0.0),
        ("packed", [("cancel", "mug"), ("cancel", "pen"), "Both are cancelled."], 0.0),
        ("packed", [("cancel", "mug"), ("cancel", "mug"), "It is cancelled."], 0.0),
    ],
)
def test_the_shop_rewards_the_right_change_and_no_other(state, replies, expected):
    module = module_of("shop")
    done = module.DONE[state]
    task = {"question": "The mug?", "orders": {"mug": state, "pen": "packed"}, "by_text": False}
    task["answer"] = [[done, "mug"]] if done else []
    replies = [each if isinstance(each, str) else (each[0], {"order": each[1]}) for each in replies]
    assert module.reward(task, asyncio.run(module.play(Saying(*replies), task, "a model"))) == expected


def test_the_shops_text_commands_end_with_the_change():
    task = {"question": "?", "orders": {"mug": "packed"}, "by_text": True, "answer": [["cancel", "mug"]]}
    for replies, expected in (
        (['look_up("mug")', 'cancel("mug")\n'], 1.0),
        (['look_up("mug")', 'refund("mug")'], 0.0),
        (["cancel the mug"], 0.0),
    ):
        assert reward_of("shop", task, replies) == expected


@pytest.mark.parametrize(
    ("answer", "replies", "expected"),
    [
        ("72", [("calculate", {"expression": "48 + 48 / 2"}), "She sold 1,072 less 1,000 clips, so 72."], 1.0),
        ("72", ["72.0"], 1.0),
        ("72", ["72 or 73"], 0.0),
        ("72", [("calculate", {"expr": "48"}), "I do not know."], 0.0),
        ("72", [("calculate", {"expression": "1"})] * 8, 0.0),
        ("42 by command", ['calculate("3*14")', 'answer("42")'], 1.0),
        ("42 by command", ['answer("42")'], 1.0),
        ("42 by command", ['calculate("3*14")', 'calculate("42")', 'calculate("42")'], 0.0),
        ("42 by command", ["42"], 0.0),
    ],
)
def test_the_last_number_of_a_solution_counts_or_the_command_that_answers(answer, replies, expected):
    number, by_text, _ = answer.partition(" by command")
    assert reward_of("gsm8k", {"question": "?", "answer": number, "by_text": bool(by_text)}, replies) == expected


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("(48 + 24) * 1", "72"),
        ("-7 / 2", "-3.5"),
        ("2 - -2", "4"),
        ("0.1 + 0.2", "0.3"),
        ("2469134 / 2", "1234567"),
        ("1000000 * 1000000 * 1000000 + 1", "1000000000000000001"),
        ("1 / 8000000", "0.000000125"),
        ("1 / 0", "error: division by zero"),
        ("__import__('os').getcwd()", "error: only numbers, + - * / and parentheses are allowed"),
    ],
)
def test_the_calculator_calculates_and_runs_no_code(expression, result):
    assert module_of("gsm8k").calculate(expression) == result


@pytest.mark.parametrize(
    ("guess", "word", "expected"),
    [
        ("crane", "crane", "GGGGG"),
        ("nacre", "crane", "YYYYG"),
        ("speed", "abide", "XXYXY"),
        ("eerie", "crane", "XXYXG"),
    ],
)
def test_a_letter_is_marked_as_often_as_the_word_has_it(guess, word, expected):
    assert module_of("wordle").marks(guess, word) == expected


@pytest.mark.parametrize(
    ("replies", "expected"),
    [
        (["<guess>trace</guess>", "I think <guess>crane</guess>."], 1.0),
        (["<guess>[CRANE]</guess>"], 1.0),
        (["<guess>trace</guess>"] * 6, 0.2 * 3 / 5),  # r, a and e are in their place
        (["<guess>trace</guess>", "I do not know."], 0.2 * 3 / 5),
        (["<guess>cranes</guess>"], 0.0),
        (["crane"], 0.0),
    ],
)
def test_the_word_is_rewarded_and_letters_in_their_place_a_little(replies, expected):
    task = {"choice": False, "question": "?", "max_guesses": 6, "word": "crane", "answer": "crane"}
    assert reward_of("wordle", task, replies) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("replies", "expected"),
    [(['guess("red")', 'guess("blue")'], 1.0), (['guess("red")'] * 3, 0.0), (["blue"], 0.0)],
)
def test_one_of_four_words_is_right_or_not(replies, expected):
    task = {"choice": True, "question": "?", "max_guesses": 3, "word": "blue", "answer": "blue"}
    assert reward_of("wordle", task, replies) == expected


@pytest.mark.parametrize("name", recipes())
def test_what_a_model_forgot_is_measured_with_its_own_replies_only(name):
    """The replies are those of SmolLM2-135M-Instruct, which a recipe for a GPU neither serves nor builds."""
    demo, report = RecipeDemo(settings_of(name, "recipe"), print), Report(title="", seed=0, reward_before=0.0)
    asyncio.run(demo._complete(report))
    assert report.forgetting is None


def test_an_unknown_recipe_is_refused_with_the_names_of_all(tmp_path):
    with pytest.raises(SettingsError, match="alphabet-sort, coding, gsm8k, reverse-text, shop, wordle"):
        find_recipe(tmp_path.name)
