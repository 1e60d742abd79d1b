"""The sandbox of the recipe `coding`: what passes its tests there, and what does not."""

from __future__ import annotations

import asyncio
from random import Random
from types import SimpleNamespace

import pytest

from examples.demos.plain_agent import load_module
from turnwise.commands.recipe import find_recipe

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
def test_code_passes_its_tests_or_is_told_why_not(code: str, expected: str):
    if "socket" in code and not coding.without_network():
        pytest.skip("this machine does not allow namespaces")
    found = coding.failure(code, TESTS)
    assert (expected in found) if expected else (found == "")


def test_each_expression_that_is_asked_for_passes_its_own_tests_and_no_other_does():
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
