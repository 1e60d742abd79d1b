"""The trail for a model that can follow a hint: in half of the warm-up's conversations one says what to do next.

The player is the demo's, which chooses at random. So the model learns to follow what a person says, as a pretrained one
can, and nothing about the task: without a hint it plays as the demo's model does.
"""

from __future__ import annotations

import json
import random

from turnwise.default_models import trail

HINT_RATE = 0.5
"""Share of the conversations with a hint, of those that end with an answer."""


def warm_up_conversation(task: trail.TrailTask, rng: random.Random) -> list[trail.Message]:
    """Return a conversation of the player, in which a person may say what it does in one of its replies."""
    messages = trail.warm_up_conversation(task, rng)
    way = way_of(messages)
    if way is None or rng.random() >= HINT_RATE:
        return messages
    return with_hint(messages, way, rng.randrange(len(way)))


def way_of(messages: list[trail.Message]) -> list[str] | None:
    """Return whom a conversation looks up and what it answers, one a reply; None without an answer."""
    names = [
        json.loads(call["function"]["arguments"])["name"] for each in messages for call in each.get("tool_calls") or ()
    ]
    answer = str(messages[-1].get("content") or "").split('"')
    return [*names, answer[1]] if len(answer) == 3 else None


def hint(way: list[str], number: int) -> str:
    """Return what a person says of a reply: whom it had to look up, or what it had to answer."""
    return f"Hint: {'answer' if number == len(way) - 1 else 'look up'} {way[number]}."


def with_hint(messages: list[trail.Message], way: list[str], number: int) -> list[trail.Message]:
    """Return the conversation with a hint before its reply of this number, which is where the proxy puts one."""
    place, text = 2 + 2 * number, hint(way, number)
    if number:
        return [*messages[:place], {"role": "user", "content": text}, *messages[place:]]
    question = {**messages[1], "content": f"{messages[1]['content']}\n\n{text}"}
    return [messages[0], question, *messages[2:]]
