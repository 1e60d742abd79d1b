"""Solve grade-school problems with a calculator; the reward is 1 for the right number."""

import ast
import functools
import json
import operator
import re
from decimal import Decimal
from pathlib import Path
from random import Random

from openai import AsyncOpenAI

FILES = {"train": "train.jsonl", "eval": "test.jsonl"}
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": 'Calculate an expression of numbers, + - * / and parentheses, such as "(3 + 4) * 12".',
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}
RULE = "Solve the problem. Use the calculator for every calculation. End with the number alone."
BY_TEXT = [
    {"role": "system", "content": 'Reply with calculate("a*b") or answer("c") only.'},
    {"role": "user", "content": 'There are "7" bags with "15" nuts each. How many nuts?'},
    {"role": "assistant", "content": 'calculate("7*15")'},
    {"role": "user", "content": 'result="105"'},
    {"role": "assistant", "content": 'answer("105")'},
]
COMMAND = re.compile(r'(calculate|answer)\("([^"]*)"\)')
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
MAX_TURNS = 8


@functools.cache
def problems(file: Path) -> list[dict]:
    """Return the problems of a file of GSM8K."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [
        {"question": each["question"], "answer": each["answer"].rpartition("####")[2].strip().replace(",", "")}
        for each in lines
    ]


def make_task(random: Random, split: str, directory: str = ".", by_text: bool = False) -> dict:
    if not by_text:
        return random.choice(problems(Path(directory, FILES[split]))) | {"by_text": False}
    numbers = range(3, 50, 2) if split == "train" else range(4, 50, 2)
    bags, nuts = random.choice(numbers), random.choice(numbers)
    question = f'There are "{bags}" bags with "{nuts}" nuts each. How many nuts?'
    return {"question": question, "answer": str(bags * nuts), "by_text": True}


def reward(task: dict, reply: str) -> float:
    if task["by_text"]:
        command = COMMAND.fullmatch(reply.strip())
        return float(command is not None and command.groups() == ("answer", task["answer"]))
    numbers = NUMBER.findall(reply.replace(",", ""))
    return float(bool(numbers) and float(numbers[-1]) == float(task["answer"]))


def calculate(expression: str) -> str:
    try:
        return written(value_of(ast.parse(expression, mode="eval").body))
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, OverflowError, RecursionError) as error:
        return f"error: {error}"


def written(value: float) -> str:
    """Return a number with all of its digits: an exponent would be read as a number of its own."""
    return f"{value:d}" if isinstance(value, int) else f"{Decimal(f'{value:.15g}'):f}"


def value_of(node: ast.AST) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    raise ValueError("only numbers, + - * / and parentheses are allowed")


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    by_text = task["by_text"]
    messages = [*(BY_TEXT if by_text else [{"role": "system", "content": RULE}])]
    messages.append({"role": "user", "content": task["question"]})
    options = {"max_completion_tokens": 16, "temperature": 0.8} if by_text else {"tools": [CALCULATOR]}
    for _ in range(3 if by_text else MAX_TURNS):
        completion = await client.chat.completions.create(model=model, messages=messages, **options)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        command = COMMAND.fullmatch((message.content or "").strip()) if by_text else None
        if command and command[1] == "calculate":
            messages.append({"role": "user", "content": f'result="{calculate(command[2])}"'})
        elif by_text or not message.tool_calls:
            return message.content or ""
        for call in message.tool_calls or []:
            content = calculate(expression_of(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
    return ""


def expression_of(arguments: str) -> str:
    try:
        return str(json.loads(arguments)["expression"])
    except (ValueError, KeyError, TypeError):
        return ""
