"""Write a Python function that passes tests, which a sandbox runs; the reward is 1 if hidden tests pass too."""

import asyncio
import functools
import json
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from random import Random

from openai import AsyncOpenAI

FILES = {"train": "train.jsonl", "eval": "test.jsonl"}
RULE = "Write the Python function that is asked for, in one block between ```python and ```. Import what you need."
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
MAX_ATTEMPTS = 3
ONE_LINE = {
    "train": {
        "x plus {n}": "x + {n}",
        "x times {n}": "x * {n}",
        "{n} minus x": "{n} - x",
        "the square of x": "x ** 2",
        "the larger of x and {n}": "max(x, {n})",
        "the absolute value of x": "abs(x)",
        "the remainder of x divided by {n}": "x % {n}",
        "true if x is greater than {n}": "x > {n}",
        "true if x is equal to {n}": "x == {n}",
        "the number of items of x": "len(x)",
        "the first item of x": "x[0]",
        "the sum of the items of x": "sum(x)",
        "the largest item of x": "max(x)",
        "the items of x in order": "sorted(x)",
    },
    "eval": {
        "x minus {n}": "x - {n}",
        "x divided by {n}": "x / {n}",
        "the smaller of x and {n}": "min(x, {n})",
        "true if x is less than {n}": "x < {n}",
        "the last item of x": "x[-1]",
        "the smallest item of x": "min(x)",
    },
}
"""What a small model is asked to return, with an expression that is right; held-out ones are in no training task."""
SHORT = [
    {"role": "system", "content": "Write the Python function."},
    {"role": "user", "content": "Return x plus x."},
    {"role": "assistant", "content": "def f(x): return x + x"},
    {"role": "user", "content": "Return the second item of x."},
    {"role": "assistant", "content": "def f(x): return x[1]"},
    {"role": "user", "content": "Return the length of x."},
    {"role": "assistant", "content": "def f(x): return len(x)"},
]
LIMITS = """import resource
for what, most in ((resource.RLIMIT_CPU, 2), (resource.RLIMIT_AS, 2**30), (resource.RLIMIT_FSIZE, 2**20)):
    resource.setrlimit(what, (most, most))
"""
SECONDS = 30


@functools.cache
def problems(file: Path) -> list[dict]:
    """Return the problems of a file of MBPP; the last tests are for the grader alone."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        {
            "question": f"{each.get('text') or each['prompt']}\nIt must pass this test: {each['test_list'][0]}",
            "test": each["test_list"][0],
            "answer": "\n".join([*each.get("test_imports", []), *each["test_list"]]),
            "one_line": False,
        }
        for each in lines
    ]


def make_task(random: Random, split: str, directory: str = ".", one_line: bool = False) -> dict:
    if not one_line:
        return random.choice(problems(Path(directory, FILES[split])))
    number, (words, expression) = random.randint(2, 9), random.choice([*ONE_LINE[split].items()])
    values = [[3, 9, 5], [7], [8, 2, 2, 6]] if "item" in words else [*range(-3, 12)]
    tests = f"for x in {values}:\n    assert f(x) == ({expression.format(n=number)})"
    return {"question": f"Return {words.format(n=number)}.", "answer": tests, "one_line": True}


def reward(task: dict, code: str) -> float:
    return float(failure(code, task["answer"]) == "")


def failure(code: str, tests: str) -> str:
    """Run code and then its tests in a process without network; return how they failed, or nothing."""
    # Code that ends the process before its tests does not print it. It is no secret from code that looks for it: tests
    # and code share a process.
    passed = secrets.token_hex()
    program = f"{LIMITS}{code}\n{tests}\nprint({passed!r})\n"
    command = [*without_network(), sys.executable, "-I", "-S", "-c", program]
    with tempfile.TemporaryDirectory() as directory:
        try:
            done = subprocess.run(  # noqa: S603 - untrusted code is what the sandbox is for
                command, cwd=directory, env={}, capture_output=True, text=True, check=False, timeout=SECONDS
            )
        except (subprocess.TimeoutExpired, ValueError) as error:  # ValueError: a null byte in the code
            return str(error)
    return "" if done.stdout.endswith(f"{passed}\n") else (done.stderr[-500:] or "it ended before its tests")


@functools.cache
def without_network() -> list[str]:
    """Return the command that runs another one in namespaces of its own, if this machine has it and allows it."""
    command = ["unshare", "--user", "--map-current-user", "--net", "--"]
    if shutil.which("unshare") is None:
        return []
    tried = subprocess.run([*command, "true"], capture_output=True, check=False)  # noqa: S603
    return [] if tried.returncode else command


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    short = task["one_line"]
    options = {"max_completion_tokens": 20, "temperature": 0.8} if short else {"max_completion_tokens": 1024}
    messages = [*(SHORT if short else [{"role": "system", "content": RULE}])]
    messages.append({"role": "user", "content": task["question"]})
    code = ""
    for _ in range(1 if short else MAX_ATTEMPTS):
        completion = await client.chat.completions.create(model=model, messages=messages, **options)
        text = completion.choices[0].message.content or ""
        if short:
            return text
        code = "\n".join(BLOCK.findall(text)[-1:])
        problem = await asyncio.to_thread(failure, code, task["test"])
        if not problem:
            break
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"It failed:\n{problem}"}]
    return code
