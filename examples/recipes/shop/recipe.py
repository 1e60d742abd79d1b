"""Serve a shop's customers with tools; the reward is 1 if their orders were changed as the shop's rule says."""

import json
import re
from random import Random

from openai import AsyncOpenAI

RULE = (
    "You serve the customers of a shop. Look the order up first. Cancel an order that is packed, refund one that is "
    "delivered, and do nothing to one that is on its way. Then answer the customer in one sentence."
)
DONE = {"packed": "cancel", "delivered": "refund", "travelling": None}
ITEMS = {
    "train": "bag ball bed bell book bowl box brush chair clock coat cup desk drum fan fork frame game glass hat",
    "eval": "lamp map mirror mug pan pen pillow plate ring shelf",
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": description,
            "parameters": {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]},
        },
    }
    for name, description in {
        "look_up": "Return the state of an order.",
        "cancel": "Cancel an order that is packed.",
        "refund": "Refund an order that is delivered.",
    }.items()
]
BY_TEXT = [
    {"role": "system", "content": 'Reply with look_up("name"), cancel("name") or refund("name") only.'},
    {"role": "user", "content": 'I do not want the "toy".'},
    {"role": "assistant", "content": 'look_up("toy")'},
    {"role": "user", "content": 'state="packed"'},
    {"role": "assistant", "content": 'cancel("toy")'},
    {"role": "user", "content": 'I do not want the "sofa".'},
    {"role": "assistant", "content": 'look_up("sofa")'},
    {"role": "user", "content": 'state="delivered"'},
    {"role": "assistant", "content": 'refund("sofa")'},
]
COMMAND = re.compile(r'(\w+)\("(\w+)"\)')
MAX_CALLS = 6


def make_task(random: Random, split: str, by_text: bool = False) -> dict:
    item, other = random.sample(ITEMS[split].split(), 2)
    states = ["packed", "delivered"] if by_text else list(DONE)
    orders = {name: random.choice(states) for name in (item, other)}
    done = DONE[orders[item]]
    question = f'I do not want the "{item}".' if by_text else f"Hello, I have changed my mind about my {item}."
    return {"question": question, "orders": orders, "by_text": by_text, "answer": [[done, item]] if done else []}


def reward(task: dict, calls: str) -> float:
    """Return 1 for the right changes and no others; looking up changes nothing."""
    return float([call for call in json.loads(calls or "[]") if call[0] != "look_up"] == task["answer"])


def use(task: dict, name: str, order: str) -> str:
    if order not in task["orders"]:
        return f"there is no order {order!r}"
    return f'state="{task["orders"][order]}"' if name == "look_up" else "done"


async def play(client: AsyncOpenAI, task: dict, model: str) -> str:
    calls: list[list[str]] = []
    messages = [*(BY_TEXT if task["by_text"] else [{"role": "system", "content": RULE}])]
    messages.append({"role": "user", "content": task["question"]})
    short = {"max_completion_tokens": 12, "temperature": 0.8}
    options = short if task["by_text"] else {"max_completion_tokens": 512, "temperature": 1.0, "tools": TOOLS}
    while len(calls) < MAX_CALLS:
        completion = await client.chat.completions.create(model=model, messages=messages, **options)
        message = completion.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        wanted = by_text(message.content) if task["by_text"] else by_tool(message.tool_calls)
        if not wanted:
            break
        calls += [[name, order] for name, order, _ in wanted]
        messages += [{**role, "content": use(task, name, order)} for name, order, role in wanted]
        if task["by_text"] and calls[-1][0] != "look_up":
            break
    return json.dumps(calls)


def by_text(text: str | None) -> list[tuple[str, str, dict]]:
    command = COMMAND.fullmatch((text or "").strip())
    return [(command[1], command[2], {"role": "user"})] if command else []


def by_tool(calls: list | None) -> list[tuple[str, str, dict]]:
    return [(each.function.name, order_of(each), {"role": "tool", "tool_call_id": each.id}) for each in calls or []]


def order_of(call: object) -> str:
    try:
        return str(json.loads(call.function.arguments)["order"])
    except (ValueError, KeyError, TypeError):
        return ""
