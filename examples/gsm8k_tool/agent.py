"""Solve grade-school problems with a calculator, by the OpenAI Agents SDK; the reward is 1 for the right number."""

import ast
import operator
import re
from typing import Any

from agents import Agent, MaxTurnsExceeded, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(disabled=True)

MAX_STEPS = 8
OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def value_of(node: ast.AST) -> float:
    if isinstance(node, ast.Expression):
        return value_of(node.body)
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATIONS:
        return OPERATIONS[type(node.op)](value_of(node.operand))
    raise ValueError("only numbers, + - * / and parentheses are allowed")


@function_tool
def calculate(expression: str) -> str:
    """Calculate an expression of numbers, + - * / and parentheses.

    Args:
        expression: For example "(3 + 4) * 12".
    """
    try:
        return f"{value_of(ast.parse(expression, mode='eval')):g}"
    except (SyntaxError, ValueError, TypeError, ZeroDivisionError, OverflowError, RecursionError) as error:
        return f"error: {error}"


def last_number(text: str) -> float | None:
    numbers = re.findall(r"-?\d+(?:\.\d+)?", text.replace(",", ""))
    return float(numbers[-1]) if numbers else None


async def play(task: dict, run: Any) -> float:
    async with AsyncOpenAI(base_url=run.base_url, api_key=run.api_key) as client:
        solver = Agent(
            name="Solver",
            instructions="Solve the problem. Use the calculator for every calculation. End with the number alone.",
            model=OpenAIChatCompletionsModel(model=run.model, openai_client=client),
            tools=[calculate],
        )
        try:
            result = await Runner.run(solver, task["question"], max_turns=MAX_STEPS)
        except MaxTurnsExceeded:
            return 0.0
    return 1.0 if last_number(str(result.final_output)) == float(task["answer"]) else 0.0
